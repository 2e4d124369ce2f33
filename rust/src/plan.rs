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
//!
//! | room | what it holds |
//! |---|---|
//! | [`request`] | what is asked: one prompt, or a trace of many |
//! | [`policy`] | what there is to plan with: maps, gates, budgets |
//! | [`planner`] | candidates, and the choice among them |
//! | [`batch`] | the choices for a whole trace, a million in a call |
//! | [`explain`] | the choice as a plan, with every reason |
//! | [`reason`] | the reasons, and their words |
//! | [`search`] | every split of a model side by side |

mod batch;
mod explain;
mod planner;
mod policy;
mod reason;
mod request;
mod search;

#[cfg(test)]
mod fixtures;

pub use batch::Choices;
pub use explain::{Plan, Rejected};
pub use planner::{Candidate, Choice, Planner};
pub use policy::{Gate, Maps, Policy, Tier};
pub use reason::Reason;
pub use request::{MAX_TOKENS, Request, Sensitivity, Trace};
pub use search::{SearchRow, search};

use crate::error::{Error, Fault};

fn refuse(what: String) -> Error {
    Fault::Plan { what }.into()
}
