//! How fast a device is: what turns operations and bytes into seconds.

use serde::{Deserialize, Serialize};

use super::amounts::Unit;
use super::{Cost, Part, refuse};
use crate::error::Result;

/// How fast a device is.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rates {
    /// Operations a second of large matrix products.
    pub matmul_flops_per_s: f64,
    /// Operations a second of causal attention.
    pub attention_flops_per_s: f64,
    /// Operations a second of attention under an explicit mask, which rows behind a cache need; None: the same.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub masked_attention_flops_per_s: Option<f64>,
    /// Bytes a second to and from memory.
    pub memory_bytes_per_s: f64,
    /// Bytes a second at which matrix products of a few rows read their weights; None: as any memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight_bytes_per_s: Option<f64>,
    /// Seconds that one layer of one call costs, whatever its rows.
    pub layer_call_s: f64,
    /// Where the figures come from.
    #[serde(default)]
    pub source: String,
}

/// Peak figures of data sheets: dense bf16 operations a second (fp32 sums) and bytes a second.
/// NVIDIA's data sheets of A100 80GB SXM, H100 SXM, H200 SXM, L4, L40S, RTX 4090 (Ada whitepaper) and B200 (HGX, per GPU).
const DEVICES: [(&str, f64, f64); 7] = [
    ("a100", 312e12, 2.039e12),
    ("h100", 989e12, 3.35e12),
    ("h200", 989e12, 4.8e12),
    ("b200", 2250e12, 7.7e12),
    ("l4", 121e12, 0.3e12),
    ("l40s", 362e12, 0.864e12),
    ("rtx4090", 165.2e12, 1.008e12),
];
/// The share of a data sheet's peak that large matrix products, attention and streams are taken to reach. Assumptions: a
/// calibration replaces them.
const REACHED: (f64, f64, f64) = (0.7, 0.5, 0.85);
/// Assumed seconds of launches for one layer of one call.
const LAUNCHES_S: f64 = 50e-6;

impl Rates {
    /// Returns the rates a JSON document gives, as `ridgefill bench --calibrate` prints them.
    pub fn from_json(json: &str) -> Result<Self> {
        let rates: Self = serde_json::from_str(json).map_err(|error| refuse(format!("rates: {error}")))?;
        rates.check()?;
        Ok(rates)
    }

    /// Returns rates for a known device: a data sheet's peaks times assumed shares of them.
    pub fn of_device(name: &str) -> Result<Self> {
        let Some((_, flops, bytes)) = DEVICES.iter().find(|(known, ..)| *known == name) else {
            let known: Vec<&str> = DEVICES.iter().map(|(known, ..)| *known).collect();
            return Err(refuse(format!(
                "device {name:?} is unknown; expected one of {}, or rates measured by `ridgefill bench --calibrate`",
                known.join(", ")
            )));
        };
        let (matmul, attention, memory) = REACHED;
        Ok(Self {
            matmul_flops_per_s: flops * matmul,
            attention_flops_per_s: flops * attention,
            masked_attention_flops_per_s: None,
            memory_bytes_per_s: bytes * memory,
            weight_bytes_per_s: None,
            layer_call_s: LAUNCHES_S,
            source: format!(
                "assumed for {name}: {:.0}% of its data sheet's bf16 peak in matrix products, {:.0}% in attention, \
                 {:.0}% of its bandwidth",
                100.0 * matmul,
                100.0 * attention,
                100.0 * memory
            ),
        })
    }

    /// Returns rates with which a cost's seconds are its operations: for ratios where no device is known.
    pub fn operations() -> Self {
        Self {
            matmul_flops_per_s: 1.0,
            attention_flops_per_s: 1.0,
            masked_attention_flops_per_s: None,
            memory_bytes_per_s: f64::INFINITY,
            weight_bytes_per_s: None,
            layer_call_s: 0.0,
            source: "operations alone: every rate is one operation a second".to_owned(),
        }
    }

    /// Refuses rates that no device has.
    pub fn check(&self) -> Result<()> {
        for (name, value) in [
            ("matmul_flops_per_s", self.matmul_flops_per_s),
            ("attention_flops_per_s", self.attention_flops_per_s),
            ("memory_bytes_per_s", self.memory_bytes_per_s),
        ] {
            if value.is_nan() || value <= 0.0 {
                return Err(refuse(format!("rates: {name} is {value}; expected more than 0")));
            }
        }
        // A masked rate above the plain one would make a longer prompt cheaper than a shorter one that needs no mask yet.
        for (name, value, limit_name, limit) in [
            (
                "masked_attention_flops_per_s",
                self.masked_attention_flops_per_s,
                "attention_flops_per_s",
                self.attention_flops_per_s,
            ),
            ("weight_bytes_per_s", self.weight_bytes_per_s, "memory_bytes_per_s", self.memory_bytes_per_s),
        ] {
            if let Some(value) = value
                && !(f64::MIN_POSITIVE..=limit).contains(&value)
            {
                return Err(refuse(format!(
                    "rates: {name} is {value}; expected more than 0 and at most {limit_name}, which is {limit}"
                )));
            }
        }
        if !(0.0..f64::INFINITY).contains(&self.layer_call_s) {
            return Err(refuse(format!("rates: layer_call_s is {}; expected 0 or more", self.layer_call_s)));
        }
        Ok(())
    }

    pub(super) fn masked_rate(&self) -> f64 {
        self.masked_attention_flops_per_s.unwrap_or(self.attention_flops_per_s)
    }

    pub(super) fn weight_rate(&self) -> f64 {
        self.weight_bytes_per_s.unwrap_or(self.memory_bytes_per_s)
    }

    /// Returns the seconds of one part.
    pub fn part_seconds(&self, cost: &Cost, part: Part) -> f64 {
        let amount = cost.of(part);
        let compute_s = match part.unit() {
            Unit::Matmul => amount.flops / self.matmul_flops_per_s,
            Unit::Attention => {
                (amount.flops - amount.masked_flops) / self.attention_flops_per_s
                    + amount.masked_flops / self.masked_rate()
            }
        };
        let memory_s =
            (amount.bytes - amount.weight_bytes) / self.memory_bytes_per_s + amount.weight_bytes / self.weight_rate();
        compute_s.max(memory_s)
    }

    /// Returns the seconds that calls take whatever they hold.
    pub fn overhead_seconds(&self, cost: &Cost) -> f64 {
        cost.layer_calls * self.layer_call_s
    }

    /// Returns the predicted time to first token of a prefill.
    pub fn seconds(&self, cost: &Cost) -> f64 {
        let parts: f64 = Part::ALL.iter().map(|part| self.part_seconds(cost, *part)).sum();
        parts + self.overhead_seconds(cost)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cost::Pricer;
    use crate::cost::fixtures::{rates, setting, shape, step};
    use crate::cost::work::visible_keys;
    use crate::rule::{Step, decide};

    #[test]
    fn a_part_takes_the_longer_of_its_operations_and_its_bytes() {
        let shape = shape(&[None; 4]);
        let pricer = Pricer::new(&shape, &setting(2)).unwrap();
        let cost = pricer.exact(&step(1));
        let rates = || Rates { weight_bytes_per_s: None, ..rates() };
        let slow_memory = Rates { memory_bytes_per_s: 1.0, ..rates() };
        assert_eq!(slow_memory.part_seconds(&cost, Part::Output), cost.of(Part::Output).bytes);
        let fast_memory = Rates { memory_bytes_per_s: f64::INFINITY, ..rates() };
        assert_eq!(fast_memory.part_seconds(&cost, Part::Output), cost.of(Part::Output).flops / 1e12);
        assert_eq!(rates().overhead_seconds(&cost), 4.0 * 1e-5);
        assert_eq!(Rates::operations().seconds(&cost), cost.flops());
    }

    #[test]
    fn a_few_rows_take_as_long_as_their_weights_do() {
        let (step, pricer) = (step(4096), Pricer::new(&shape(&[None; 4]), &setting(2)).unwrap());
        let cost = pricer.filled(&step, &decide(&step).unwrap(), &[]);
        let slow = Rates { weight_bytes_per_s: Some(1e9), ..rates() };
        // The head's 4 rows wait for the weights of every layer; bulk and tail rows do not notice.
        let weight_bytes = 2.0 * 4.0 * (2.0 * 576.0 * (9.0 + 3.0) * 64.0 + 3.0 * 576.0 * 1536.0);
        assert_eq!(cost.of(Part::HeadMatmul).weight_bytes, weight_bytes);
        let waited = slow.part_seconds(&cost, Part::HeadMatmul);
        assert!((waited / (weight_bytes / 1e9) - 1.0).abs() < 0.01, "{waited}");
        for part in [Part::EarlyMatmul, Part::Fill] {
            let fast = Rates { memory_bytes_per_s: 1e15, ..slow.clone() };
            assert_eq!(fast.part_seconds(&cost, part), cost.of(part).flops / 1e12, "{}", part.name());
        }
    }

    #[test]
    fn rows_behind_a_cache_or_past_a_window_pay_for_their_mask() {
        let causal = Rates { masked_attention_flops_per_s: None, memory_bytes_per_s: f64::INFINITY, ..rates() };
        let masked = Rates { masked_attention_flops_per_s: Some(1e11), ..causal.clone() };
        let seconds = |windows: &[Option<u64>], cached_tokens: u64| {
            let cost = Pricer::new(&shape(windows), &setting(1)).unwrap().exact(&Step { cached_tokens, ..step(1000) });
            let part = Part::EarlyAttention;
            (masked.part_seconds(&cost, part), causal.part_seconds(&cost, part))
        };
        let (with, without) = seconds(&[None; 2], 0);
        assert_eq!(with, without);
        let (with, without) = seconds(&[Some(1000); 2], 0);
        assert_eq!(with, without);
        for (windows, cached_tokens) in [([None; 2], 1), ([Some(999); 2], 0)] {
            let (with, without) = seconds(&windows, cached_tokens);
            assert!((with / without - 5.0).abs() < 1e-12, "{with} and {without}");
        }
        // A fill: the early layers' bulk needs none, the tail does in every layer.
        let (step, pricer) = (step(4096), Pricer::new(&shape(&[None; 2]), &setting(1)).unwrap());
        let cost = pricer.filled(&step, &decide(&step).unwrap(), &[]);
        let tail = 4.0 * 576.0 * visible_keys(4096 - 512, 4096, None);
        assert_eq!(cost.of(Part::EarlyAttention).masked_flops, tail);
        assert_eq!(cost.of(Part::LateAttention).masked_flops, tail);
    }

    #[test]
    fn rates_that_no_device_has_are_refused() {
        let json = |rates: &Rates| serde_json::to_string(rates).unwrap();
        assert_eq!(Rates::from_json(&json(&rates())).unwrap(), rates());
        for (bad, words) in [
            ("{}".to_owned(), "rates: missing field"),
            (json(&Rates { matmul_flops_per_s: 0.0, ..rates() }), "matmul_flops_per_s is 0"),
            (json(&Rates { attention_flops_per_s: -1.0, ..rates() }), "attention_flops_per_s is -1"),
            (
                json(&Rates { masked_attention_flops_per_s: Some(6e11), ..rates() }),
                "masked_attention_flops_per_s is 600000000000; expected more than 0 and at most",
            ),
            (json(&Rates { memory_bytes_per_s: 0.0, ..rates() }), "memory_bytes_per_s is 0"),
            (
                json(&Rates { weight_bytes_per_s: Some(2e11), ..rates() }),
                "weight_bytes_per_s is 200000000000; expected more than 0 and at most memory_bytes_per_s, which is 1",
            ),
            (json(&Rates { layer_call_s: -1.0, ..rates() }), "layer_call_s is -1"),
        ] {
            let error = Rates::from_json(&bad).unwrap_err().to_string();
            assert!(error.contains(words), "{error} lacks {words}");
        }
        assert!(Rates::of_device("abacus").unwrap_err().to_string().contains("expected one of a100, h100"));
        assert!(Rates::of_device("h100").unwrap().source.contains("70% of its data sheet's"));
    }
}
