//! Why a plan is what it is, and why another one was rejected: numbers first, words when asked for.

use std::fmt;

use super::Tier;
use crate::rule;

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
