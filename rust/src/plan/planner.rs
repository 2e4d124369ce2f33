//! Candidates, and the choice among them.

use super::policy::{DEFAULT_SHARE, Gate};
use super::{Policy, Request, Sensitivity, Tier, refuse};
use crate::cost::{Fill, Pricer, Quick, Setting, Shape};
use crate::error::{Error, Result};
use crate::rule::{self, Decision, decide};

/// One way that a planner may choose.
#[derive(Debug, Clone)]
pub struct Candidate {
    /// How it runs.
    pub tier: Tier,
    /// The first late layer; None for `exact`.
    pub split: Option<usize>,
    /// The last prompt rows that stay exact.
    pub tail: u64,
    /// What its gate measured, at least 0; None where nothing was.
    pub loss_nats: Option<f64>,
    pub(super) pricer: Pricer,
    pub(super) quick: Quick,
}

/// A choice, without its words.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Choice {
    /// The index of the chosen one in [`Planner::candidates`]; 0 is `exact`.
    pub candidate: usize,
    /// Its predicted time to first token.
    pub ttft_s: f64,
    /// The same with every row exact.
    pub exact_ttft_s: f64,
    pub(super) why: Why,
}

/// The rule that made a choice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Why {
    Accuracy,
    OnlyExact,
    NothingFaster,
    Fastest,
    MeetsTarget,
    MissesTarget,
}

/// One candidate for one request.
#[derive(Debug, Clone, Copy)]
pub(super) struct Assessment {
    pub(super) ttft_s: f64,
    pub(super) memory_bytes: f64,
    pub(super) decision: Decision,
    /// None: it may be chosen.
    pub(super) obstacle: Option<Obstacle>,
}

#[derive(Debug, Clone, Copy)]
pub(super) enum Obstacle {
    Accuracy,
    UnknownLoss,
    OverBudget { loss: f64, budget: f64 },
    NothingToFill(rule::Reason),
    OverMemory { bytes: f64, budget: f64 },
}

/// A model and a policy, made ready: it plans without an allocation.
#[derive(Debug, Clone)]
pub struct Planner {
    pub(super) policy: Policy,
    pub(super) candidates: Vec<Candidate>,
}

impl Planner {
    /// Returns a planner for this model.
    pub fn new(shape: &Shape, policy: Policy) -> Result<Self> {
        if !(0.0..).contains(&policy.loss_budget_nats) {
            return Err(refuse(format!("policy: loss_budget_nats is {}; expected 0 or more", policy.loss_budget_nats)));
        }
        if policy.memory_budget_bytes.is_some_and(|bytes| !(0.0..).contains(&bytes)) {
            return Err(refuse("policy: memory_budget_bytes is below 0 or not a number".to_owned()));
        }
        for (name, value) in [("tail", policy.tail), ("tile", policy.tile)] {
            if value < 1 {
                return Err(refuse(format!("policy: {name} is 0; expected at least 1")));
            }
        }
        policy.rates.check()?;
        let base = Setting {
            fill: Fill { split: 0, features: 1, fused_rank: None },
            selected_share: 0.0,
            chunk_tokens: policy.chunk_tokens,
            element_bytes: policy.element_bytes,
            map_element_bytes: policy.map_element_bytes,
        };
        let ready = |setting: &Setting| {
            let pricer = Pricer::new(shape, setting)?;
            let quick = Quick::new(&pricer, &policy.rates);
            Ok::<_, Error>((pricer, quick))
        };
        let (pricer, quick) = ready(&base)?;
        let mut candidates =
            vec![Candidate { tier: Tier::Exact, split: None, tail: policy.tail, loss_nats: Some(0.0), pricer, quick }];
        for (index, maps) in policy.maps.iter().enumerate() {
            if policy.maps[..index].iter().any(|other| other.split == maps.split) {
                return Err(refuse(format!("policy: maps: split {} is listed twice", maps.split)));
            }
            for gate in &maps.gates {
                gate.check(maps.split)?;
            }
            for tier in [Tier::Quality, Tier::Speed] {
                let measured = maps.gates.iter().filter(|gate| gate.tier == tier);
                let unknown = Gate { tier, dnll: f64::NAN, tail: None, share: None };
                let mut gates: Vec<&Gate> = measured.collect();
                if gates.is_empty() {
                    gates.push(&unknown);
                }
                for gate in gates {
                    let share = if tier == Tier::Quality { gate.share.unwrap_or(DEFAULT_SHARE) } else { 0.0 };
                    let fill = Fill { split: maps.split, features: maps.features, fused_rank: maps.fused_rank };
                    let (pricer, quick) = ready(&Setting { fill, selected_share: share, ..base })?;
                    candidates.push(Candidate {
                        tier,
                        split: Some(maps.split),
                        tail: gate.tail.unwrap_or(policy.tail),
                        // A fill that happened to lower the loss is not better than exact.
                        loss_nats: (!gate.dnll.is_nan()).then_some(gate.dnll.max(0.0)),
                        pricer,
                        quick,
                    });
                }
            }
        }
        Ok(Self { policy, candidates })
    }

    /// Returns what a choice is made of: `exact` first.
    pub fn candidates(&self) -> &[Candidate] {
        &self.candidates
    }

    /// Returns the choice for a request, or None when not even the smallest plan fits the memory budget.
    pub fn choose(&self, request: &Request) -> Result<Option<Choice>> {
        request.check()?;
        let exact = self.assess(&self.candidates[0], request)?;
        let better = |a: (f64, f64), b: (f64, f64)| a.0 < b.0 || (a.0 == b.0 && a.1 < b.1);
        // (time, loss) and (loss, time), each with its candidate.
        let mut fastest: Option<(f64, f64, usize)> = None;
        let mut least: Option<(f64, f64, usize)> = None;
        let target = request.deciding_target();
        let mut fills = 0;
        let (budget, accuracy) = (request.budget(&self.policy), request.sensitivity == Sensitivity::Accuracy);
        for (index, candidate) in self.candidates.iter().enumerate() {
            // What its loss rules out need not be priced.
            if index > 0 && (accuracy || candidate.loss_nats.is_none_or(|loss| loss > budget)) {
                continue;
            }
            let assessed = if index == 0 { exact } else { self.assess(candidate, request)? };
            let (None, Some(loss)) = (assessed.obstacle, candidate.loss_nats) else { continue };
            fills += usize::from(index > 0);
            let ttft = assessed.ttft_s;
            if fastest.is_none_or(|(time, other, _)| better((ttft, loss), (time, other))) {
                fastest = Some((ttft, loss, index));
            }
            if target.is_some_and(|target| ttft <= target)
                && least.is_none_or(|(other, time, _)| better((loss, ttft), (other, time)))
            {
                least = Some((loss, ttft, index));
            }
        }
        let Some((time, _, index)) = fastest else { return Ok(None) };
        let (ttft_s, candidate) = least.map_or((time, index), |(_, time, index)| (time, index));
        let why = match (target, least) {
            _ if accuracy => Why::Accuracy,
            (Some(_), Some(_)) => Why::MeetsTarget,
            (Some(_), None) => Why::MissesTarget,
            _ if fills == 0 => Why::OnlyExact,
            _ if candidate == 0 => Why::NothingFaster,
            _ => Why::Fastest,
        };
        Ok(Some(Choice { candidate, ttft_s, exact_ttft_s: exact.ttft_s, why }))
    }

    /// Prices a candidate and finds what stands against it.
    pub(super) fn assess(&self, candidate: &Candidate, request: &Request) -> Result<Assessment> {
        let step = request.step(&self.policy, candidate.tail);
        let decision = decide(&step)?;
        let pricer = &candidate.pricer;
        let exact = candidate.tier == Tier::Exact;
        let total = request.prompt_tokens + request.output_tokens;
        let (cost, activations, maps) = if exact {
            (pricer.exact(&step), pricer.exact_activation_bytes(&step), 0.0)
        } else {
            let cost = pricer.filled(&step, &decision, &request.exact_spans);
            (cost, pricer.filled_activation_bytes(&decision, &step), pricer.map_bytes())
        };
        let memory_bytes = pricer.cache_bytes(total) + activations + maps;
        let budget = request.budget(&self.policy);
        let obstacle = match (candidate.loss_nats, self.policy.memory_budget_bytes) {
            _ if !exact && request.sensitivity == Sensitivity::Accuracy => Some(Obstacle::Accuracy),
            (None, _) => Some(Obstacle::UnknownLoss),
            (Some(loss), _) if loss > budget => Some(Obstacle::OverBudget { loss, budget }),
            _ if !exact && decision.rows_filled() == 0 => Some(Obstacle::NothingToFill(decision.reason)),
            (_, Some(budget)) if memory_bytes > budget => Some(Obstacle::OverMemory { bytes: memory_bytes, budget }),
            _ => None,
        };
        Ok(Assessment { ttft_s: self.policy.rates.seconds(&cost), memory_bytes, decision, obstacle })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::fixtures::*;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(1024) })]

        #[test]
        fn a_larger_loss_budget_never_slows_a_plan(
            maps in any_maps(), request in any_request(), budget in 0.0f64..0.4, more in 0.0f64..0.4,
        ) {
            let with = |budget| Policy { maps: maps.clone(), loss_budget_nats: budget, ..policy() };
            let (small, large) = (chosen(with(budget), &request).unwrap(), chosen(with(budget + more), &request).unwrap());
            prop_assert!(large.0 <= small.0);
            prop_assert!(small.1 <= budget);
        }

        #[test]
        fn a_smaller_target_never_gives_a_slower_plan(
            maps in any_maps(), request in any_request(), target in 1e-4f64..20.0, part in 0.01f64..1.0,
        ) {
            let with = |target| Request { ttft_target_s: Some(target), ..request.clone() };
            let policy = Policy { maps, loss_budget_nats: 0.3, ..policy() };
            let late = chosen(policy.clone(), &with(target)).unwrap();
            let soon = chosen(policy, &with(target * part)).unwrap();
            prop_assert!(soon.0 <= late.0);
        }

        #[test]
        fn a_longer_prompt_never_turns_an_accuracy_sensitive_request_into_a_fill(
            maps in any_maps(), request in any_request(), more in 0u64..1_000_000, budget in 0.0f64..10.0,
        ) {
            let request = Request {
                sensitivity: Sensitivity::Accuracy, prompt_tokens: request.prompt_tokens + more, ..request
            };
            let planner = Planner::new(&shape(), Policy { maps, loss_budget_nats: budget, ..policy() }).unwrap();
            prop_assert_eq!(planner.choose(&request).unwrap().unwrap().candidate, 0);
        }

        #[test]
        fn a_larger_memory_budget_never_slows_a_latency_sensitive_request(
            maps in any_maps(), request in any_request(), bytes in 0.0f64..1e10, more in 0.0f64..1e10,
        ) {
            let request = Request { sensitivity: Sensitivity::Latency, ..request };
            let with = |bytes| Policy {
                maps: maps.clone(), memory_budget_bytes: Some(bytes), loss_budget_nats: 0.3, ..policy()
            };
            if let Some((ttft, _)) = chosen(with(bytes), &request) {
                prop_assert!(chosen(with(bytes + more), &request).unwrap().0 <= ttft);
            }
        }
    }
}
