//! What there is to plan with: rates, maps and what their gates measured, budgets.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::refuse;
use crate::cost::{self, Rates};
use crate::error::Result;

/// The share of bulk rows that the quality tier runs exactly where a gate names none (design, section 3).
pub(super) const DEFAULT_SHARE: f64 = 0.1;

/// How a prompt is run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs)]
pub enum Tier {
    Exact,
    Quality,
    Speed,
}

impl fmt::Display for Tier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Exact => "exact",
            Self::Quality => "quality",
            Self::Speed => "speed",
        })
    }
}

/// What there is to plan with.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Policy {
    /// The device's rates; without them operations stand for seconds.
    #[serde(default = "Rates::operations")]
    pub rates: Rates,
    /// The maps at hand.
    #[serde(default)]
    pub maps: Vec<Maps>,
    /// The most loss, in nats a token, that a plan may add.
    pub loss_budget_nats: f64,
    /// Bytes that maps, cache and activations may take together, beside the weights.
    #[serde(default)]
    pub memory_budget_bytes: Option<f64>,
    /// The last prompt rows that stay exact, where a gate does not name its own.
    #[serde(default = "cost::default_tail")]
    pub tail: u64,
    /// The first rows that stay exact.
    #[serde(default = "cost::default_head")]
    pub head: u64,
    /// Fewer bulk rows than this are not filled.
    #[serde(default = "cost::default_min_bulk")]
    pub min_bulk: u64,
    /// A fill is a multiple of so many rows.
    #[serde(default = "cost::one")]
    pub tile: u64,
    /// Bulk rows in one call.
    #[serde(default)]
    pub chunk_tokens: Option<u64>,
    /// Bytes of a weight, an activation, a cache element.
    #[serde(default = "cost::two_bytes")]
    pub element_bytes: f64,
    /// Bytes of an element of a map.
    #[serde(default = "cost::two_bytes")]
    pub map_element_bytes: f64,
}

/// The maps of one split.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Maps {
    /// The first layer that does not run on bulk rows.
    pub split: usize,
    /// Width of the maps' input, in units of the stream's.
    #[serde(default = "cost::one")]
    pub features: u64,
    /// The rank of fused maps' row scale; None for two-step maps.
    #[serde(default)]
    pub fused_rank: Option<u64>,
    /// What was measured.
    #[serde(default)]
    pub gates: Vec<Gate>,
}

/// One measured loss.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Gate {
    /// `quality` or `speed`.
    pub tier: Tier,
    /// Nats a token more than exact, on the exact tail.
    pub dnll: f64,
    /// The tail it was measured with.
    #[serde(default)]
    pub tail: Option<u64>,
    /// The share of selected rows it was measured with (quality).
    #[serde(default)]
    pub share: Option<f64>,
}

impl Policy {
    /// Returns the policy a JSON document describes.
    pub fn from_json(json: &str) -> Result<Self> {
        serde_json::from_str(json).map_err(|error| refuse(format!("policy: {error}")))
    }
}

impl Gate {
    /// Refuses what no gate measures.
    pub(super) fn check(&self, split: usize) -> Result<()> {
        let refuse = |what: String| Err(refuse(format!("policy: maps of split {split}: gates: {what}")));
        match *self {
            Gate { tier: Tier::Exact, .. } => {
                refuse("tier is exact, which has no maps; expected quality or speed".to_owned())
            }
            Gate { dnll, .. } if !dnll.is_finite() => refuse(format!("dnll is {dnll}; expected a number of nats")),
            Gate { tail: Some(0), .. } => refuse("tail is 0; expected at least 1".to_owned()),
            Gate { tier: Tier::Speed, share: Some(_), .. } => {
                refuse("tier speed selects no rows; leave share out".to_owned())
            }
            Gate { share: Some(share), .. } if !(0.0..=1.0).contains(&share) || share == 0.0 => {
                refuse(format!("share is {share}; expected more than 0 and at most 1"))
            }
            _ => Ok(()),
        }
    }
}
