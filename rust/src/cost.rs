//! What a prefill costs, exact and filled: operations, bytes, memory and, with a device's rates, seconds. The one
//! formula behind every "ratio FLOPs allow", every prediction and every plan.
//!
//! A multiply and an add are two operations. Norms, rotary embeddings, softmax and other work linear in the
//! width are left out on both sides. Attention counts each visible (query, key) pair once: a causal row at
//! position p sees p + 1 keys, or `window` of them.
//!
//! Time is a roofline: each [`Part`] takes the longer of its operations at the device's rate and its bytes at the
//! memory's, and each layer of each call adds a fixed overhead. docs/planning.md derives it and says what it leaves out.
//!
//! | room | what it holds |
//! |---|---|
//! | [`shape`] | the numbers of a model that its cost is made of |
//! | [`amounts`] | the parts of a prefill, and operations and bytes of each |
//! | [`work`] | layers that run exactly, summed |
//! | [`pricer`] | a step priced: exact, filled, its memory |
//! | [`rates`] | how fast a device is: amounts to seconds |
//! | [`quick`] | a filled step's seconds, up to rounding, for choosing among many plans |
//! | [`report`] | the whole answer in numbers, and the break-even length |
//! | [`question`] | what is asked for, as JSON |

mod amounts;
mod pricer;
mod question;
mod quick;
mod rates;
mod report;
mod shape;
mod work;

#[cfg(test)]
pub(crate) mod fixtures;

pub use amounts::{Amount, Cost, Part};
pub use pricer::{Fill, PrefillCost, Pricer, Setting, prefill_cost};
pub use question::Question;
pub(crate) use question::{default_head, default_min_bulk, default_tail, one, two_bytes};
pub use quick::{Quick, ROUNDING};
pub use rates::Rates;
pub use report::{PartReport, Report, Side, report};
pub use shape::{Layer, Shape};

use crate::error::{Error, Fault};

/// The longest prompt that is priced, and for which a break-even length is looked for.
const LONGEST_PROMPT: u64 = 1 << 24;

fn refuse(what: String) -> Error {
    Fault::Schedule { what }.into()
}
