//! The planner: a request and a policy give a plan, with its reasons. Pure: no clock, no state, no guess.
//!
//! A policy lists the maps at hand and what their gates measured; each (split, tier) with a measured loss is one
//! candidate beside `exact`, and one without is refused as unknown. Of the candidates that the loss and memory budgets
//! allow, the request's sensitivity picks:
//!
//! | sensitivity | loss budget | picks |
//! |---|---|---|
//! | latency | all of it | the fastest |
//! | balanced, with a TTFT target | all of it | the least loss of those that meet the target; if none does, the fastest |
//! | balanced, without | half of it | the fastest |
//! | accuracy | none | `exact`, always |
//!
//! So a larger loss budget never slows a plan, a smaller target never gives a slower one, a larger memory budget never
//! slows a latency-sensitive request, and no prompt, however long, turns an accuracy-sensitive request into a fill.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::cost::{self, Fill, Part, Pricer, Rates, Setting, Shape, report};
use crate::error::{Error, Fault, Result};
use crate::rule::{self, Decision, Step, decide};

/// The longest prompt that is planned.
pub const MAX_TOKENS: u64 = 1 << 32;
/// From here on a plan says how much of its time is attention that filling cannot help.
const LONG_PROMPT: u64 = 128 * 1024;
/// The share of bulk rows that the quality tier runs exactly where a gate names none (design, section 3).
const DEFAULT_SHARE: f64 = 0.1;
/// The part of the loss budget that a balanced request without a target spends.
const BALANCED_PART: f64 = 0.5;

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

/// What a request cares about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs)]
pub enum Sensitivity {
    Latency,
    #[default]
    Balanced,
    Accuracy,
}

/// One prompt to plan.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Request {
    /// The whole prompt, rows already cached included.
    pub prompt_tokens: u64,
    /// Rows already cached.
    #[serde(default)]
    pub cached_tokens: u64,
    /// Tokens to be generated, for which the cache must have room.
    #[serde(default)]
    pub output_tokens: u64,
    /// What matters.
    #[serde(default)]
    pub sensitivity: Sensitivity,
    /// The time to first token that is asked for.
    #[serde(default)]
    pub ttft_target_s: Option<f64>,
    /// Rows `[from, to)` that must run exactly, ascending and apart.
    #[serde(default)]
    pub exact_spans: Vec<(u64, u64)>,
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
    pricer: Pricer,
}

/// A choice, without its words: what a million requests a second can afford.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Choice {
    /// The index of the chosen one in [`Planner::candidates`]; 0 is `exact`.
    pub candidate: usize,
    /// Its predicted time to first token.
    pub ttft_s: f64,
    /// The same with every row exact.
    pub exact_ttft_s: f64,
    why: Why,
}

/// The rule that made a choice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Why {
    Accuracy,
    OnlyExact,
    NothingFaster,
    Fastest,
    MeetsTarget,
    MissesTarget,
}

/// One candidate for one request.
#[derive(Debug, Clone, Copy)]
struct Assessment {
    ttft_s: f64,
    memory_bytes: f64,
    decision: Decision,
    /// None: it may be chosen.
    obstacle: Option<Obstacle>,
}

#[derive(Debug, Clone, Copy)]
enum Obstacle {
    Accuracy,
    UnknownLoss,
    OverBudget { loss: f64, budget: f64 },
    NothingToFill(rule::Reason),
    OverMemory { bytes: f64, budget: f64 },
}

/// Why a plan is what it is, or why another one was rejected; `Display` says it in words.
#[derive(Debug, Clone, Copy, PartialEq)]
#[allow(missing_docs)] // the fields are the numbers that the text shows
pub enum Reason {
    AccuracySensitive,
    NoMaps,
    OnlyExactAllowed,
    NothingFaster,
    Fastest { budget: f64 },
    FastestInHalf { budget: f64 },
    LeastLossInTime { target_s: f64 },
    NoneInTime { target_s: f64 },
    InTime { target_s: f64 },
    NotInTime { target_s: f64 },
    NamedRows { rows: u64 },
    EarlyAttention { share: f64, split: usize },
    // Rejected.
    RejectedAccuracy,
    UnknownLoss { split: usize, tier: Tier },
    OverBudget { loss: f64, budget: f64 },
    NothingToFill(rule::Reason),
    OverMemory { bytes: f64, budget: f64 },
    NotFaster { ttft_s: f64, chosen_s: f64 },
    LosesMore { loss: f64, chosen: f64 },
    TooLate { ttft_s: f64, target_s: f64 },
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ms = |seconds: f64| 1e3 * seconds;
        match *self {
            Self::AccuracySensitive => write!(f, "the request is accuracy-sensitive: every row stays exact"),
            Self::NoMaps => write!(f, "the policy holds no maps"),
            Self::OnlyExactAllowed => write!(f, "no fill is allowed; the rejected plans say why"),
            Self::NothingFaster => write!(f, "no allowed fill is predicted to be faster than exact"),
            Self::Fastest { budget } => write!(f, "the fastest plan within the loss budget of {budget} nats"),
            Self::FastestInHalf { budget } => write!(
                f,
                "the fastest plan within half of the loss budget of {budget} nats: the request is balanced and names no \
                 TTFT target"
            ),
            Self::LeastLossInTime { target_s } => {
                write!(f, "the least loss of the plans that meet the TTFT target of {:.1} ms", ms(target_s))
            }
            Self::NoneInTime { target_s } => {
                write!(f, "no allowed plan meets the TTFT target of {:.1} ms; this is the fastest", ms(target_s))
            }
            Self::InTime { target_s } => write!(f, "it meets the TTFT target of {:.1} ms", ms(target_s)),
            Self::NotInTime { target_s } => write!(f, "it misses the TTFT target of {:.1} ms", ms(target_s)),
            Self::NamedRows { rows } => write!(f, "{rows} named rows of the bulk run exactly"),
            Self::EarlyAttention { share, split } => write!(
                f,
                "{:.0}% of its time is attention below layer {split}, which filling cannot help",
                100.0 * share
            ),
            Self::RejectedAccuracy => write!(f, "the request is accuracy-sensitive, and a fill is not exact"),
            Self::UnknownLoss { split, tier } => write!(
                f,
                "its loss is unknown: the policy holds no gate result for split {split}, tier {tier}; measure it, or leave \
                 the tier out"
            ),
            Self::OverBudget { loss, budget } => {
                write!(f, "its measured loss of {loss} nats is over the budget of {budget} for this request")
            }
            Self::NothingToFill(reason) => write!(f, "{reason}"),
            Self::OverMemory { bytes, budget } => write!(
                f,
                "maps, cache and activations take {:.1} MB; the memory budget is {:.1} MB",
                bytes / 1e6,
                budget / 1e6
            ),
            Self::NotFaster { ttft_s, chosen_s } => {
                write!(f, "not faster: {:.1} ms, the chosen plan takes {:.1} ms", ms(ttft_s), ms(chosen_s))
            }
            Self::LosesMore { loss, chosen } => {
                write!(f, "it is in time too, and loses {loss} nats where the chosen plan loses {chosen}")
            }
            Self::TooLate { ttft_s, target_s } => {
                write!(f, "its {:.1} ms miss the TTFT target of {:.1} ms", ms(ttft_s), ms(target_s))
            }
        }
    }
}

/// A plan in words and numbers, ready for JSON.
#[derive(Debug, Clone, Serialize)]
#[allow(missing_docs)]
pub struct Plan {
    pub tier: Tier,
    pub split: Option<usize>,
    pub head: u64,
    pub tail: u64,
    pub selected_share: f64,
    /// Calls that the filled rows take; 0 where nothing is filled.
    pub chunks: u64,
    /// Rows `[from, to)` that are filled, selected ones among them.
    pub fill: (u64, u64),
    pub ttft_s: f64,
    pub exact_ttft_s: f64,
    pub ratio: f64,
    pub loss_nats: f64,
    pub memory_bytes: f64,
    pub meets_target: Option<bool>,
    pub reasons: Vec<String>,
    pub rejected: Vec<Rejected>,
}

/// An alternative that was not chosen.
#[derive(Debug, Clone, Serialize)]
#[allow(missing_docs)]
pub struct Rejected {
    pub tier: Tier,
    pub split: Option<usize>,
    pub ttft_s: f64,
    pub loss_nats: Option<f64>,
    pub reason: String,
}

/// Many requests, field by field: what a server's log or a NumPy trace holds.
#[derive(Debug, Clone, Copy, Default)]
pub struct Trace<'a> {
    /// The prompts' lengths.
    pub prompt_tokens: &'a [i64],
    /// Rows already cached; None for none.
    pub cached_tokens: Option<&'a [i64]>,
    /// Tokens to be generated; None for none.
    pub output_tokens: Option<&'a [i64]>,
    /// 0 latency, 1 balanced, 2 accuracy; None for balanced.
    pub sensitivity: Option<&'a [u8]>,
    /// Targets in seconds, NaN for none; None for none.
    pub ttft_target_s: Option<&'a [f64]>,
}

/// The choices for a trace, field by field.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Choices {
    /// Indices into [`Planner::candidates`]; -1 where no plan fits the memory budget.
    pub candidate: Vec<i32>,
    /// Predicted times to first token; NaN where no plan fits.
    pub ttft_s: Vec<f64>,
    /// The same with every row exact.
    pub exact_ttft_s: Vec<f64>,
}

/// A model and a policy, made ready: it plans without an allocation.
#[derive(Debug, Clone)]
pub struct Planner {
    policy: Policy,
    candidates: Vec<Candidate>,
}

impl Policy {
    /// Returns the policy a JSON document describes.
    pub fn from_json(json: &str) -> Result<Self> {
        serde_json::from_str(json).map_err(|error| refuse(format!("policy: {error}")))
    }
}

impl Request {
    /// Returns the request a JSON document describes.
    pub fn from_json(json: &str) -> Result<Self> {
        serde_json::from_str(json).map_err(|error| refuse(format!("request: {error}")))
    }

    /// Refuses what no prompt is.
    fn check(&self) -> Result<()> {
        let Self { prompt_tokens, cached_tokens, output_tokens, ttft_target_s, .. } = *self;
        if !(1..=MAX_TOKENS).contains(&prompt_tokens) {
            return Err(refuse(format!("prompt_tokens is {prompt_tokens}; expected 1 to {MAX_TOKENS}")));
        }
        if cached_tokens >= prompt_tokens {
            return Err(refuse(format!(
                "cached_tokens is {cached_tokens} of a prompt of {prompt_tokens}; expected fewer: one row at least is computed"
            )));
        }
        if output_tokens > MAX_TOKENS {
            return Err(refuse(format!("output_tokens is {output_tokens}; expected at most {MAX_TOKENS}")));
        }
        if ttft_target_s.is_some_and(|target| !(f64::MIN_POSITIVE..f64::INFINITY).contains(&target)) {
            return Err(refuse(format!(
                "ttft_target_s is {}; expected more than 0",
                ttft_target_s.unwrap_or_default()
            )));
        }
        let mut last = 0;
        for &(from, to) in &self.exact_spans {
            if from >= to || from < last || to > prompt_tokens {
                return Err(refuse(format!(
                    "exact_spans: [{from}, {to}) is empty, out of order or past the prompt's end at {prompt_tokens}"
                )));
            }
            last = to;
        }
        Ok(())
    }

    fn step(&self, policy: &Policy, tail: u64) -> Step {
        Step {
            cached_tokens: self.cached_tokens,
            step_tokens: self.prompt_tokens - self.cached_tokens,
            n_ahead: 0,
            tail,
            head: policy.head,
            min_bulk: policy.min_bulk,
            tile: policy.tile,
            logits_to_keep: 1,
        }
    }

    /// The loss that this request may spend of a budget.
    fn budget(&self, policy: &Policy) -> f64 {
        match (self.sensitivity, self.ttft_target_s) {
            (Sensitivity::Accuracy, _) => 0.0,
            (Sensitivity::Balanced, None) => BALANCED_PART * policy.loss_budget_nats,
            (Sensitivity::Latency, _) | (Sensitivity::Balanced, Some(_)) => policy.loss_budget_nats,
        }
    }

    /// The target that its choice is made by; a latency-sensitive request takes the fastest plan whatever its target.
    fn deciding_target(&self) -> Option<f64> {
        self.ttft_target_s.filter(|_| self.sensitivity == Sensitivity::Balanced)
    }
}

impl Trace<'_> {
    /// Returns one request.
    fn request(&self, index: usize) -> Result<Request> {
        let count = |name: &str, values: Option<&[i64]>| {
            let value = values.map_or(0, |values| values[index]);
            u64::try_from(value).map_err(|_| refuse(format!("{name} is {value}; expected 0 or more")))
        };
        Ok(Request {
            prompt_tokens: count("prompt_tokens", Some(self.prompt_tokens))?,
            cached_tokens: count("cached_tokens", self.cached_tokens)?,
            output_tokens: count("output_tokens", self.output_tokens)?,
            sensitivity: match self.sensitivity.map_or(1, |values| values[index]) {
                0 => Sensitivity::Latency,
                1 => Sensitivity::Balanced,
                2 => Sensitivity::Accuracy,
                code => {
                    return Err(refuse(format!("sensitivity is {code}; expected 0 latency, 1 balanced or 2 accuracy")));
                }
            },
            ttft_target_s: self.ttft_target_s.map(|values| values[index]).filter(|target| !target.is_nan()),
            exact_spans: Vec::new(),
        })
    }
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
        let mut candidates = vec![Candidate {
            tier: Tier::Exact,
            split: None,
            tail: policy.tail,
            loss_nats: Some(0.0),
            pricer: Pricer::new(shape, &base)?,
        }];
        for (index, maps) in policy.maps.iter().enumerate() {
            if policy.maps[..index].iter().any(|other| other.split == maps.split) {
                return Err(refuse(format!("policy: maps: split {} is listed twice", maps.split)));
            }
            for gate in &maps.gates {
                check_gate(maps.split, gate)?;
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
                    candidates.push(Candidate {
                        tier,
                        split: Some(maps.split),
                        tail: gate.tail.unwrap_or(policy.tail),
                        // A fill that happened to lower the loss is not better than exact.
                        loss_nats: (!gate.dnll.is_nan()).then_some(gate.dnll.max(0.0)),
                        pricer: Pricer::new(shape, &Setting { fill, selected_share: share, ..base })?,
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

    /// Returns the choices for a whole trace.
    ///
    /// # Errors
    /// [`Fault::Plan`] when fields differ in length, or names the first request that makes no sense.
    pub fn choose_all(&self, trace: &Trace<'_>) -> Result<Choices> {
        let count = trace.prompt_tokens.len();
        for (name, length) in [
            ("cached_tokens", trace.cached_tokens.map(<[i64]>::len)),
            ("output_tokens", trace.output_tokens.map(<[i64]>::len)),
            ("sensitivity", trace.sensitivity.map(<[u8]>::len)),
            ("ttft_target_s", trace.ttft_target_s.map(<[f64]>::len)),
        ] {
            if length.is_some_and(|length| length != count) {
                let length = length.unwrap_or_default();
                return Err(refuse(format!("trace: {name} has {length} entries; prompt_tokens has {count}")));
            }
        }
        let mut choices = Choices {
            candidate: Vec::with_capacity(count),
            ttft_s: Vec::with_capacity(count),
            exact_ttft_s: Vec::with_capacity(count),
        };
        for index in 0..count {
            let choice = trace
                .request(index)
                .and_then(|request| self.choose(&request))
                .map_err(|error| refuse(format!("trace: request {index}: {error}")))?;
            choices.candidate.push(choice.map_or(-1, |choice| choice.candidate as i32));
            choices.ttft_s.push(choice.map_or(f64::NAN, |choice| choice.ttft_s));
            choices.exact_ttft_s.push(choice.map_or(f64::NAN, |choice| choice.exact_ttft_s));
        }
        Ok(choices)
    }

    /// Returns the plan for a request, with every reason.
    ///
    /// # Errors
    /// [`Fault::Plan`] when the request makes no sense, or when no plan fits the memory budget.
    pub fn plan(&self, request: &Request) -> Result<Plan> {
        let Some(choice) = self.choose(request)? else {
            let smallest = self
                .candidates
                .iter()
                .map(|candidate| self.assess(candidate, request).map(|assessed| assessed.memory_bytes))
                .collect::<Result<Vec<f64>>>()?
                .into_iter()
                .fold(f64::INFINITY, f64::min);
            return Err(refuse(format!(
                "no allowed plan fits: {} prompt and {} output tokens take at least {:.1} MB beside the weights, the memory \
                 budget is {:.1} MB; give more memory, or a shorter prompt",
                request.prompt_tokens,
                request.output_tokens,
                smallest / 1e6,
                self.policy.memory_budget_bytes.unwrap_or(f64::INFINITY) / 1e6
            )));
        };
        let chosen = &self.candidates[choice.candidate];
        let assessed = self.assess(chosen, request)?;
        let fill = (assessed.decision.fill_start, assessed.decision.fill_end);
        let filled = chosen.tier != Tier::Exact;
        let rejected = self.candidates.iter().enumerate().filter(|(index, _)| *index != choice.candidate);
        let rejected: Result<Vec<Rejected>> = rejected
            .map(|(_, candidate)| {
                let other = self.assess(candidate, request)?;
                Ok(Rejected {
                    tier: candidate.tier,
                    split: candidate.split,
                    ttft_s: other.ttft_s,
                    loss_nats: candidate.loss_nats,
                    reason: rejection(candidate, &other, chosen, &choice, request).to_string(),
                })
            })
            .collect();
        Ok(Plan {
            tier: chosen.tier,
            split: chosen.split,
            head: self.policy.head,
            tail: chosen.tail,
            selected_share: chosen.pricer.setting().selected_share,
            chunks: if filled { chosen.pricer.chunks(fill.1 - fill.0) } else { 0 },
            fill: if filled { fill } else { (fill.0, fill.0) },
            ttft_s: choice.ttft_s,
            exact_ttft_s: choice.exact_ttft_s,
            ratio: choice.exact_ttft_s / choice.ttft_s,
            loss_nats: chosen.loss_nats.unwrap_or_default(),
            memory_bytes: assessed.memory_bytes,
            meets_target: request.ttft_target_s.map(|target| choice.ttft_s <= target),
            reasons: self.reasons(request, &choice, &assessed).iter().map(Reason::to_string).collect(),
            rejected: rejected?,
        })
    }

    fn reasons(&self, request: &Request, choice: &Choice, assessed: &Assessment) -> Vec<Reason> {
        let budget = self.policy.loss_budget_nats;
        let target_s = request.ttft_target_s.unwrap_or(f64::INFINITY);
        let mut reasons = vec![match choice.why {
            Why::Accuracy => Reason::AccuracySensitive,
            Why::OnlyExact if self.candidates.len() == 1 => Reason::NoMaps,
            Why::OnlyExact => Reason::OnlyExactAllowed,
            Why::NothingFaster => Reason::NothingFaster,
            Why::Fastest if request.sensitivity == Sensitivity::Balanced => Reason::FastestInHalf { budget },
            Why::Fastest => Reason::Fastest { budget },
            Why::MeetsTarget => Reason::LeastLossInTime { target_s },
            Why::MissesTarget => Reason::NoneInTime { target_s },
        }];
        if request.ttft_target_s.is_some() && !matches!(choice.why, Why::MeetsTarget | Why::MissesTarget) {
            let in_time = choice.ttft_s <= target_s;
            reasons.push(if in_time { Reason::InTime { target_s } } else { Reason::NotInTime { target_s } });
        }
        let chosen = &self.candidates[choice.candidate];
        if let Some(split) = chosen.split {
            let Decision { fill_start, fill_end, .. } = assessed.decision;
            let inside = |&(from, to): &(u64, u64)| to.clamp(fill_start, fill_end) - from.clamp(fill_start, fill_end);
            let rows = request.exact_spans.iter().map(inside).sum();
            if rows > 0 {
                reasons.push(Reason::NamedRows { rows });
            }
            if request.prompt_tokens >= LONG_PROMPT {
                let step = request.step(&self.policy, chosen.tail);
                let cost = chosen.pricer.filled(&step, &assessed.decision, &request.exact_spans);
                let early = self.policy.rates.part_seconds(&cost, Part::EarlyAttention);
                reasons.push(Reason::EarlyAttention { share: early / choice.ttft_s, split });
            }
        }
        reasons
    }

    /// Prices a candidate and finds what stands against it.
    fn assess(&self, candidate: &Candidate, request: &Request) -> Result<Assessment> {
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

/// Returns why a candidate was not chosen.
fn rejection(
    candidate: &Candidate,
    assessed: &Assessment,
    chosen: &Candidate,
    choice: &Choice,
    request: &Request,
) -> Reason {
    let (loss, chosen_loss) = (candidate.loss_nats.unwrap_or_default(), chosen.loss_nats.unwrap_or_default());
    match (assessed.obstacle, request.deciding_target()) {
        (Some(Obstacle::Accuracy), _) => Reason::RejectedAccuracy,
        (Some(Obstacle::UnknownLoss), _) => {
            Reason::UnknownLoss { split: candidate.split.unwrap_or_default(), tier: candidate.tier }
        }
        (Some(Obstacle::OverBudget { loss, budget }), _) => Reason::OverBudget { loss, budget },
        (Some(Obstacle::NothingToFill(reason)), _) => Reason::NothingToFill(reason),
        (Some(Obstacle::OverMemory { bytes, budget }), _) => Reason::OverMemory { bytes, budget },
        (None, Some(target_s)) if choice.why == Why::MeetsTarget && assessed.ttft_s > target_s => {
            Reason::TooLate { ttft_s: assessed.ttft_s, target_s }
        }
        (None, Some(_)) if choice.why == Why::MeetsTarget && loss > chosen_loss => {
            Reason::LosesMore { loss, chosen: chosen_loss }
        }
        (None, _) => Reason::NotFaster { ttft_s: assessed.ttft_s, chosen_s: choice.ttft_s },
    }
}

fn check_gate(split: usize, gate: &Gate) -> Result<()> {
    let refuse = |what: String| Err(refuse(format!("policy: maps of split {split}: gates: {what}")));
    match *gate {
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

/// One split of a search.
#[derive(Debug, Clone, Serialize)]
#[allow(missing_docs)]
pub struct SearchRow {
    pub split: usize,
    pub rows_filled: u64,
    pub flops_ratio: f64,
    pub ttft_ratio: Option<f64>,
    pub exact_s: Option<f64>,
    pub filled_s: Option<f64>,
    /// The ratio if late layers cost nothing.
    pub ratio_limit: f64,
    pub early_attention_share: f64,
    pub map_bytes: f64,
    pub cache_bytes: f64,
    pub break_even_tokens: Option<u64>,
    /// What a gate measured; None: unknown.
    pub loss_nats: Option<f64>,
    /// Whether the loss is known and within the bound; None where no bound was asked for.
    pub allowed: Option<bool>,
    /// Whether no other split with a known loss is both at least as fast and at least as close.
    pub pareto: bool,
}

/// Returns what every split would give: `setting` is used with each of them, `losses` are measured ones by split.
pub fn search(
    shape: &Shape,
    setting: &Setting,
    step: &Step,
    rates: Option<&Rates>,
    losses: &[(usize, f64)],
    max_loss: Option<f64>,
) -> Result<Vec<SearchRow>> {
    let total = step.cached_tokens + step.step_tokens;
    let mut rows = Vec::with_capacity(shape.layers.len());
    for split in 0..shape.layers.len() {
        let pricer = Pricer::new(shape, &Setting { fill: Fill { split, ..setting.fill }, ..*setting })?;
        let report = report(&pricer, step, total, rates)?;
        let loss_nats = losses.iter().find(|(known, _)| *known == split).map(|(_, loss)| *loss);
        rows.push(SearchRow {
            split,
            rows_filled: report.rows_filled,
            flops_ratio: report.flops_ratio,
            ttft_ratio: report.ttft_ratio,
            exact_s: report.exact.seconds,
            filled_s: report.filled.seconds,
            ratio_limit: report.ratio_limit,
            early_attention_share: report.early_attention_share,
            map_bytes: report.map_bytes,
            cache_bytes: report.filled.cache_bytes,
            break_even_tokens: report.break_even_tokens,
            loss_nats,
            allowed: max_loss.map(|bound| loss_nats.is_some_and(|loss| loss <= bound)),
            pareto: false,
        });
    }
    let points: Vec<Option<(f64, f64)>> =
        rows.iter().map(|row| row.loss_nats.map(|loss| (row.ttft_ratio.unwrap_or(row.flops_ratio), loss))).collect();
    for (row, point) in rows.iter_mut().zip(&points) {
        row.pareto = point.is_some_and(|(ratio, loss)| {
            !points.iter().flatten().any(|&(other_ratio, other_loss)| {
                other_ratio >= ratio && other_loss <= loss && (other_ratio > ratio || other_loss < loss)
            })
        });
    }
    Ok(rows)
}

fn refuse(what: String) -> Error {
    Fault::Plan { what }.into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn shape() -> Shape {
        let layer = r#"{"num_attention_heads":9,"num_key_value_heads":3,"head_dim":64,"mlp_flops_per_row":5308416,"window":null}"#;
        let layers = vec![layer; 30].join(",");
        Shape::from_json(&format!(r#"{{"hidden_size":576,"vocab_size":49152,"layers":[{layers}]}}"#)).unwrap()
    }

    fn gate(tier: Tier, dnll: f64) -> Gate {
        Gate { tier, dnll, tail: None, share: None }
    }

    fn maps(split: usize, gates: Vec<Gate>) -> Maps {
        Maps { split, features: 1, fused_rank: None, gates }
    }

    fn policy() -> Policy {
        Policy {
            rates: Rates {
                matmul_flops_per_s: 1e12,
                attention_flops_per_s: 5e11,
                memory_bytes_per_s: 1e11,
                layer_call_s: 1e-5,
                source: String::new(),
            },
            maps: vec![
                maps(10, vec![gate(Tier::Speed, 0.32)]),
                maps(20, vec![gate(Tier::Quality, 0.01), gate(Tier::Speed, 0.04)]),
            ],
            loss_budget_nats: 0.05,
            memory_budget_bytes: None,
            tail: 512,
            head: 4,
            min_bulk: 256,
            tile: 1,
            chunk_tokens: None,
            element_bytes: 2.0,
            map_element_bytes: 2.0,
        }
    }

    fn request(prompt_tokens: u64, sensitivity: Sensitivity, ttft_target_s: Option<f64>) -> Request {
        Request { prompt_tokens, sensitivity, ttft_target_s, ..Request::default() }
    }

    fn planned(policy: &Policy, request: &Request) -> Plan {
        Planner::new(&shape(), policy.clone()).unwrap().plan(request).unwrap()
    }

    /// The plan holds a reason, or rejects an alternative for one, with these words.
    fn says(plan: &Plan, words: &str) {
        let all: Vec<&String> = plan.reasons.iter().chain(plan.rejected.iter().map(|other| &other.reason)).collect();
        assert!(all.iter().any(|reason| reason.contains(words)), "{all:#?} lack {words}");
    }

    #[test]
    fn every_reason_can_be_given() {
        use Sensitivity::{Accuracy, Balanced, Latency};
        let policy = policy();
        let slow = |tier| (tier, planned(&policy, &request(8192, tier, None)));

        let (_, plan) = slow(Accuracy);
        assert_eq!((plan.tier, plan.ratio, plan.loss_nats, plan.chunks), (Tier::Exact, 1.0, 0.0, 0));
        says(&plan, "the request is accuracy-sensitive: every row stays exact");
        says(&plan, "the request is accuracy-sensitive, and a fill is not exact");

        let (_, plan) = slow(Latency);
        assert_eq!((plan.tier, plan.split, plan.loss_nats, plan.chunks), (Tier::Speed, Some(20), 0.04, 1));
        assert_eq!((plan.head, plan.tail, plan.fill), (4, 512, (4, 8192 - 512)));
        says(&plan, "the fastest plan within the loss budget of 0.05 nats");
        says(&plan, "its loss is unknown: the policy holds no gate result for split 10, tier quality");
        says(&plan, "its measured loss of 0.32 nats is over the budget of 0.05");
        says(&plan, "not faster: ");
        assert_eq!(plan.rejected.len(), 4);

        let (_, plan) = slow(Balanced);
        assert_eq!((plan.tier, plan.split, plan.selected_share), (Tier::Quality, Some(20), DEFAULT_SHARE));
        says(&plan, "the fastest plan within half of the loss budget of 0.05 nats");
        says(&plan, "its measured loss of 0.04 nats is over the budget of 0.025");

        let exact = plan.exact_ttft_s;
        let plan = planned(&policy, &request(8192, Balanced, Some(exact)));
        assert_eq!((plan.tier, plan.meets_target), (Tier::Exact, Some(true)));
        says(&plan, "the least loss of the plans that meet the TTFT target");
        says(&plan, "it is in time too, and loses 0.04 nats where the chosen plan loses 0");
        let quality = slow(Balanced).1.ttft_s;
        let plan = planned(&policy, &request(8192, Balanced, Some(quality)));
        assert_eq!((plan.tier, plan.meets_target), (Tier::Quality, Some(true)));
        says(&plan, "miss the TTFT target");
        let plan = planned(&policy, &request(8192, Balanced, Some(1e-9)));
        assert_eq!((plan.tier, plan.meets_target), (Tier::Speed, Some(false)));
        says(&plan, "no allowed plan meets the TTFT target of 0.0 ms; this is the fastest");
        says(&planned(&policy, &request(8192, Latency, Some(10.0))), "it meets the TTFT target of 10000.0 ms");
        says(&planned(&policy, &request(8192, Latency, Some(1e-3))), "it misses the TTFT target of 1.0 ms");

        says(&planned(&policy, &request(600, Latency, None)), "84 bulk rows are fewer than min_bulk=256");
        says(&planned(&policy, &request(600, Latency, None)), "no fill is allowed; the rejected plans say why");
        says(
            &planned(&Policy { maps: vec![], ..policy.clone() }, &request(8192, Latency, None)),
            "the policy holds no maps",
        );
        let last = Policy { maps: vec![maps(29, vec![gate(Tier::Quality, 0.0)])], ..policy.clone() };
        let overhead = Rates { layer_call_s: 1.0, ..policy.rates.clone() };
        let plan = planned(&Policy { rates: overhead, ..last }, &request(8192, Latency, None));
        assert_eq!(plan.tier, Tier::Exact);
        says(&plan, "no allowed fill is predicted to be faster than exact");

        let named = Request { exact_spans: vec![(0, 14), (100, 200), (8000, 8100)], ..request(8192, Latency, None) };
        says(&planned(&policy, &named), "110 named rows of the bulk run exactly");
        let plan = planned(&policy, &request(131_072, Latency, None));
        says(&plan, "% of its time is attention below layer 20, which filling cannot help");
        assert!(plan.reasons.iter().all(|reason| !reason.contains(" 0%")));

        // Maps take memory: 9 of 576 x 576 above split 20, 2 bytes each; the budget has room for exact alone.
        let exact = planned(&policy, &request(8192, Accuracy, None));
        let tight = Policy { memory_budget_bytes: Some(exact.memory_bytes), ..policy.clone() };
        let chunky = Policy { chunk_tokens: Some(1024), ..tight.clone() };
        says(&planned(&tight, &request(8192, Latency, None)), "maps, cache and activations take");
        assert_eq!(planned(&chunky, &request(8192, Latency, None)).chunks, 8);
    }

    #[test]
    fn what_fits_no_memory_is_an_error() {
        let planner = Planner::new(&shape(), Policy { memory_budget_bytes: Some(1e6), ..policy() }).unwrap();
        for sensitivity in [Sensitivity::Latency, Sensitivity::Balanced, Sensitivity::Accuracy] {
            let request = request(8192, sensitivity, None);
            assert_eq!(planner.choose(&request).unwrap(), None);
            let error = planner.plan(&request).unwrap_err();
            assert_eq!(error.kind(), "plan");
            assert!(error.to_string().contains("the memory budget is 1.0 MB"), "{error}");
        }
    }

    #[test]
    fn gates_carry_their_own_tail_and_share() {
        let gates = vec![Gate { tier: Tier::Quality, dnll: -0.001, tail: Some(1024), share: Some(0.2) }];
        let plan =
            planned(&Policy { maps: vec![maps(15, gates)], ..policy() }, &request(8192, Sensitivity::Latency, None));
        assert_eq!((plan.tail, plan.selected_share, plan.fill.1, plan.loss_nats), (1024, 0.2, 8192 - 1024, 0.0));
    }

    #[test]
    fn nonsense_is_refused() {
        let with = |gates| Policy { maps: vec![maps(15, gates)], ..policy() };
        for (bad, words) in [
            (Policy { loss_budget_nats: -1.0, ..policy() }, "loss_budget_nats is -1"),
            (Policy { loss_budget_nats: f64::NAN, ..policy() }, "loss_budget_nats is NaN"),
            (Policy { memory_budget_bytes: Some(-1.0), ..policy() }, "memory_budget_bytes is below 0"),
            (Policy { tail: 0, ..policy() }, "tail is 0"),
            (Policy { tile: 0, ..policy() }, "tile is 0"),
            (Policy { rates: Rates { layer_call_s: f64::NAN, ..policy().rates }, ..policy() }, "layer_call_s is NaN"),
            (Policy { maps: vec![maps(15, vec![]), maps(15, vec![])], ..policy() }, "split 15 is listed twice"),
            (Policy { maps: vec![maps(30, vec![])], ..policy() }, "split is 30"),
            (with(vec![gate(Tier::Exact, 0.0)]), "tier is exact"),
            (with(vec![gate(Tier::Speed, f64::INFINITY)]), "dnll is inf"),
            (with(vec![Gate { tail: Some(0), ..gate(Tier::Speed, 0.1) }]), "tail is 0"),
            (with(vec![Gate { share: Some(0.1), ..gate(Tier::Speed, 0.1) }]), "tier speed selects no rows"),
            (with(vec![Gate { share: Some(0.0), ..gate(Tier::Quality, 0.1) }]), "share is 0"),
        ] {
            let error = Planner::new(&shape(), bad).unwrap_err().to_string();
            assert!(error.contains(words), "{error} lacks {words}");
        }
        let planner = Planner::new(&shape(), policy()).unwrap();
        let good = request(8192, Sensitivity::Balanced, None);
        for (bad, words) in [
            (Request { prompt_tokens: 0, ..good.clone() }, "prompt_tokens is 0"),
            (Request { prompt_tokens: MAX_TOKENS + 1, ..good.clone() }, "prompt_tokens is 4294967297"),
            (Request { cached_tokens: 8192, ..good.clone() }, "cached_tokens is 8192 of a prompt of 8192"),
            (Request { output_tokens: u64::MAX, ..good.clone() }, "output_tokens is"),
            (Request { ttft_target_s: Some(0.0), ..good.clone() }, "ttft_target_s is 0"),
            (Request { ttft_target_s: Some(f64::NAN), ..good.clone() }, "ttft_target_s is NaN"),
            (Request { exact_spans: vec![(5, 5)], ..good.clone() }, "exact_spans: [5, 5) is empty"),
            (Request { exact_spans: vec![(5, 9), (8, 10)], ..good.clone() }, "exact_spans: [8, 10)"),
            (Request { exact_spans: vec![(8000, 9000)], ..good.clone() }, "past the prompt's end at 8192"),
        ] {
            let error = planner.choose(&bad).unwrap_err();
            assert_eq!(error.kind(), "plan");
            assert!(error.to_string().contains(words), "{error} lacks {words}");
        }
        assert!(Policy::from_json("{}").unwrap_err().to_string().starts_with("policy: missing field"));
        assert!(Request::from_json("5").unwrap_err().to_string().starts_with("request: "));
        let minimal = Policy::from_json(r#"{"loss_budget_nats": 0.01}"#).unwrap();
        assert_eq!((minimal.tail, minimal.head, minimal.min_bulk, minimal.tile), (512, 4, 256, 1));
    }

    #[test]
    fn a_trace_is_its_requests_one_by_one() {
        let planner = Planner::new(&shape(), Policy { memory_budget_bytes: Some(3e9), ..policy() }).unwrap();
        let trace = Trace {
            prompt_tokens: &[100, 8192, 8192, 8192, 8192, 1_000_000],
            cached_tokens: Some(&[0, 0, 0, 4096, 0, 0]),
            output_tokens: Some(&[10; 6]),
            sensitivity: Some(&[0, 0, 1, 1, 2, 0]),
            ttft_target_s: Some(&[f64::NAN, f64::NAN, 0.5, f64::NAN, f64::NAN, f64::NAN]),
        };
        let choices = planner.choose_all(&trace).unwrap();
        for index in 0..6 {
            let choice = planner.choose(&trace.request(index).unwrap()).unwrap();
            assert_eq!(choices.candidate[index], choice.map_or(-1, |choice| choice.candidate as i32));
            if let Some(choice) = choice {
                assert_eq!((choices.ttft_s[index], choices.exact_ttft_s[index]), (choice.ttft_s, choice.exact_ttft_s));
            }
        }
        assert_eq!((choices.candidate[0], choices.candidate[4], choices.candidate[5]), (0, 0, -1));
        assert!(choices.candidate[1] > 0 && choices.candidate[3] > 0 && choices.ttft_s[5].is_nan());

        let prompts = Trace { prompt_tokens: &[8192, 8192], ..Trace::default() };
        assert_eq!(planner.choose_all(&Trace::default()).unwrap(), Choices::default());
        for (bad, words) in [
            (Trace { prompt_tokens: &[8192, -1], ..prompts }, "trace: request 1: prompt_tokens is -1"),
            (Trace { cached_tokens: Some(&[0, 8192]), ..prompts }, "trace: request 1: cached_tokens is 8192"),
            (Trace { cached_tokens: Some(&[0]), ..prompts }, "cached_tokens has 1 entries; prompt_tokens has 2"),
            (Trace { output_tokens: Some(&[0, -3]), ..prompts }, "output_tokens is -3"),
            (Trace { sensitivity: Some(&[0, 7]), ..prompts }, "request 1: sensitivity is 7"),
            (Trace { ttft_target_s: Some(&[0.0, 1.0]), ..prompts }, "request 0: ttft_target_s is 0"),
        ] {
            let error = planner.choose_all(&bad).unwrap_err().to_string();
            assert!(error.contains(words), "{error} lacks {words}");
        }
    }

    #[test]
    fn a_search_marks_what_is_allowed_and_what_is_best() {
        let step = request(32_768, Sensitivity::Balanced, None).step(&policy(), 512);
        let losses = [(10, 0.32), (15, 0.26), (16, 0.27), (20, 0.04)];
        let rates = policy().rates;
        let rows = search(&shape(), &Setting::default(), &step, Some(&rates), &losses, Some(0.05)).unwrap();
        assert_eq!(rows.len(), 30);
        // Split 16 is slower than 15 and loses more.
        let best: Vec<usize> = rows.iter().filter(|row| row.pareto).map(|row| row.split).collect();
        assert_eq!(best, [10, 15, 20]);
        let allowed: Vec<usize> = rows.iter().filter(|row| row.allowed == Some(true)).map(|row| row.split).collect();
        assert_eq!(allowed, [20]);
        for pair in rows.windows(2) {
            assert!(pair[0].flops_ratio > pair[1].flops_ratio && pair[0].map_bytes > pair[1].map_bytes);
            assert!(pair[0].ttft_ratio <= Some(pair[0].ratio_limit));
        }
        let unknown = search(&shape(), &Setting::default(), &step, None, &[], None).unwrap();
        assert!(unknown.iter().all(|row| row.ttft_ratio.is_none() && row.allowed.is_none() && !row.pareto));
    }

    fn any_maps() -> impl Strategy<Value = Vec<Maps>> {
        let gate = (any::<bool>(), 0.0f64..0.5, 1u64..2000, 0.01f64..1.0).prop_map(|(speed, dnll, tail, share)| Gate {
            tier: if speed { Tier::Speed } else { Tier::Quality },
            dnll,
            tail: Some(tail),
            share: (!speed).then_some(share),
        });
        prop::collection::btree_map(0usize..30, prop::collection::vec(gate, 0..4), 0..4)
            .prop_map(|all| all.into_iter().map(|(split, gates)| maps(split, gates)).collect())
    }

    fn any_request() -> impl Strategy<Value = Request> {
        let sensitivity =
            prop_oneof![Just(Sensitivity::Latency), Just(Sensitivity::Balanced), Just(Sensitivity::Accuracy)];
        let prompt = prop_oneof![1u64..3000, 1u64..200_000];
        (prompt, 0.0f64..1.0, 0u64..5000, sensitivity, prop::option::of(1e-4f64..20.0)).prop_map(
            |(prompt_tokens, cached, output_tokens, sensitivity, ttft_target_s)| Request {
                prompt_tokens,
                cached_tokens: (cached * cached * prompt_tokens as f64) as u64,
                output_tokens,
                sensitivity,
                ttft_target_s,
                exact_spans: vec![],
            },
        )
    }

    fn chosen(policy: Policy, request: &Request) -> Option<(f64, f64)> {
        let planner = Planner::new(&shape(), policy).unwrap();
        let choice = planner.choose(request).unwrap()?;
        Some((choice.ttft_s, planner.candidates()[choice.candidate].loss_nats.unwrap()))
    }

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

        #[test]
        fn a_plan_keeps_every_bound_and_accounts_for_every_candidate(
            maps in any_maps(), request in any_request(), bytes in prop::option::of(1e8f64..1e10),
        ) {
            let policy = Policy { maps, memory_budget_bytes: bytes, loss_budget_nats: 0.2, ..policy() };
            let planner = Planner::new(&shape(), policy).unwrap();
            let Some(choice) = planner.choose(&request).unwrap() else {
                prop_assert!(planner.plan(&request).is_err());
                return Ok(());
            };
            let plan = planner.plan(&request).unwrap();
            prop_assert_eq!(plan.ttft_s, choice.ttft_s);
            prop_assert!(plan.loss_nats <= 0.2 && plan.memory_bytes <= bytes.unwrap_or(f64::INFINITY));
            prop_assert_eq!(plan.rejected.len() + 1, planner.candidates().len());
            prop_assert!(!plan.reasons.is_empty());
            prop_assert_eq!(plan.tier == Tier::Exact, plan.fill.0 == plan.fill.1);
            prop_assert_eq!(plan.tier == Tier::Exact, plan.split.is_none());
            prop_assert!(plan.fill.1 + plan.tail <= request.prompt_tokens || plan.tier == Tier::Exact);
        }
    }
}
