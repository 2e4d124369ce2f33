//! The choice as a plan: in words and numbers, with every reason and every rejected alternative.

use serde::Serialize;

use super::planner::{Assessment, Candidate, Choice, Obstacle, Planner, Why};
use super::{Reason, Request, Sensitivity, Tier, refuse};
use crate::cost::Part;
use crate::error::Result;
use crate::rule::Decision;

/// From here on a plan says how much of its time is attention that filling cannot help.
const LONG_PROMPT: u64 = 128 * 1024;

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

impl Planner {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cost::Rates;
    use crate::plan::fixtures::*;
    use crate::plan::policy::DEFAULT_SHARE;
    use crate::plan::{Gate, MAX_TOKENS, Policy};
    use proptest::prelude::*;

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

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(1024) })]

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
