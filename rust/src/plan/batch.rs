//! A whole trace at once. Candidates are told apart by their quick seconds; what is reported is priced the plain way, so
//! that a trace is its requests one by one, to the last bit.

use super::{Planner, Request, Sensitivity, Trace, refuse};
use crate::cost::ROUNDING;
use crate::error::Result;
use crate::rule::decide;

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

/// A plan while a choice is made: its seconds, its loss in nats, and its index.
#[derive(Clone, Copy)]
struct Entry {
    ttft_s: f64,
    loss: f64,
    index: usize,
}

/// What a quick look at a request gives.
enum Look {
    /// The chosen candidate, or None when no plan fits; its seconds and those of exact.
    Clear(Option<(usize, f64, f64)>),
    /// Two figures lie closer together than rounding lets them be told apart.
    Unclear,
}

/// Returns whether `a` is less than `b`; None where they are too close to tell, or no numbers.
fn less(a: f64, b: f64) -> Option<bool> {
    let difference = a - b;
    (difference.abs() > ROUNDING * a.max(b)).then_some(difference < 0.0)
}

impl Planner {
    /// Returns the choices for a whole trace, each as [`Planner::choose`] makes it.
    ///
    /// # Errors
    /// [`Fault::Plan`](crate::error::Fault::Plan) when fields differ in length, or names the first request that makes no
    /// sense.
    pub fn choose_all(&self, trace: &Trace<'_>) -> Result<Choices> {
        let count = trace.check()?;
        let mut choices = Choices {
            candidate: Vec::with_capacity(count),
            ttft_s: Vec::with_capacity(count),
            exact_ttft_s: Vec::with_capacity(count),
        };
        for index in 0..count {
            let choice = trace
                .request(index)
                .and_then(|request| match self.look(&request)? {
                    Look::Clear(choice) => Ok(choice),
                    Look::Unclear => {
                        let choice = self.choose(&request)?;
                        Ok(choice.map(|choice| (choice.candidate, choice.ttft_s, choice.exact_ttft_s)))
                    }
                })
                .map_err(|error| refuse(format!("trace: request {index}: {error}")))?;
            let (candidate, ttft_s, exact_ttft_s) =
                choice.map_or((-1, f64::NAN, f64::NAN), |(index, ttft, exact)| (index as i32, ttft, exact));
            choices.candidate.push(candidate);
            choices.ttft_s.push(ttft_s);
            choices.exact_ttft_s.push(exact_ttft_s);
        }
        Ok(choices)
    }

    /// Makes a request's choice with two plans priced in full, exact and the chosen one; or finds it too close for that.
    fn look(&self, request: &Request) -> Result<Look> {
        request.check()?;
        let Some((first, fills)) = self.candidates.split_first() else { return Ok(Look::Unclear) };
        let exact = self.assess(first, request)?;
        let allowed = exact.obstacle.is_none().then_some(Entry { ttft_s: exact.ttft_s, loss: 0.0, index: 0 });
        let target = request.deciding_target();
        let (mut fastest, mut least) =
            (allowed, allowed.filter(|_| target.is_some_and(|target| exact.ttft_s <= target)));
        let budget = request.budget(&self.policy);
        let memory = self.policy.memory_budget_bytes;
        // The same for every candidate: they differ in activations and maps.
        let cache_bytes =
            memory.map_or(0.0, |_| first.pricer.cache_bytes(request.prompt_tokens + request.output_tokens));
        let mut step = request.step(&self.policy, first.tail);
        let mut decision = exact.decision;
        let fills = if request.sensitivity == Sensitivity::Accuracy { &[] } else { fills };
        for (index, candidate) in fills.iter().enumerate() {
            let Some(loss) = candidate.loss_nats.filter(|loss| *loss <= budget) else { continue };
            if candidate.tail != step.tail {
                step.tail = candidate.tail;
                decision = decide(&step)?;
            }
            let pricer = &candidate.pricer;
            if decision.rows_filled() == 0
                || memory.is_some_and(|budget| {
                    cache_bytes + pricer.filled_activation_bytes(&decision, &step) + pricer.map_bytes() > budget
                })
            {
                continue;
            }
            let this = Entry { ttft_s: candidate.quick.seconds(&step, &decision), loss, index: index + 1 };
            match fastest.map_or(Some(true), |other| less(this.ttft_s, other.ttft_s)) {
                Some(true) => fastest = Some(this),
                Some(false) => {}
                None => return Ok(Look::Unclear),
            }
            let Some(target) = target else { continue };
            let Some(in_time) = less(this.ttft_s, target) else { return Ok(Look::Unclear) };
            let better = match least {
                _ if !in_time => Some(false),
                Some(other) if loss == other.loss => less(this.ttft_s, other.ttft_s),
                other => Some(other.is_none_or(|other| loss < other.loss)),
            };
            match better {
                Some(true) => least = Some(this),
                Some(false) => {}
                None => return Ok(Look::Unclear),
            }
        }
        let Some(Entry { index, .. }) = least.or(fastest) else { return Ok(Look::Clear(None)) };
        let ttft_s = if index == 0 { exact.ttft_s } else { self.assess(&self.candidates[index], request)?.ttft_s };
        Ok(Look::Clear(Some((index, ttft_s, exact.ttft_s))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::fixtures::*;
    use crate::plan::{Gate, Maps, Policy, Tier};
    use proptest::prelude::*;

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

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(256) })]

        #[test]
        fn a_trace_is_the_plain_choice_request_by_request(
            maps in any_maps(), requests in prop::collection::vec(any_request(), 1..20), budget in 0.0f64..0.6,
            memory in prop::option::of(1e8f64..1e10), chunk in prop::option::of(1u64..5000), tile in 1u64..100,
            close in any::<prop::sample::Index>(), twice in any::<bool>(),
        ) {
            let mut maps = maps;
            if twice {
                // Two plans that take equally long: only their losses, or their order, tell them apart.
                for split in &mut maps {
                    let other: Vec<Gate> = split.gates.iter().map(|gate| Gate { dnll: gate.dnll / 2.0, ..*gate }).collect();
                    split.gates.extend(other);
                }
            }
            let policy = Policy {
                maps, memory_budget_bytes: memory, loss_budget_nats: budget, chunk_tokens: chunk, tile, ..policy()
            };
            let planner = Planner::new(&shape(), policy).unwrap();
            let mut requests = requests;
            // A target that one plan meets to the last bit, and the next number below it.
            let candidate = &planner.candidates[close.index(planner.candidates.len())];
            let exactly = planner.assess(candidate, &requests[0]).unwrap().ttft_s;
            for target in [exactly, exactly.next_down()] {
                requests.push(Request {
                    sensitivity: Sensitivity::Balanced, ttft_target_s: Some(target), ..requests[0].clone()
                });
            }
            let prompts: Vec<i64> = requests.iter().map(|request| request.prompt_tokens as i64).collect();
            let cached: Vec<i64> = requests.iter().map(|request| request.cached_tokens as i64).collect();
            let output: Vec<i64> = requests.iter().map(|request| request.output_tokens as i64).collect();
            let codes: Vec<u8> = requests.iter().map(|request| request.sensitivity as u8).collect();
            let targets: Vec<f64> = requests.iter().map(|request| request.ttft_target_s.unwrap_or(f64::NAN)).collect();
            let choices = planner.choose_all(&Trace {
                prompt_tokens: &prompts, cached_tokens: Some(&cached), output_tokens: Some(&output),
                sensitivity: Some(&codes), ttft_target_s: Some(&targets),
            }).unwrap();
            for (index, request) in requests.iter().enumerate() {
                let plain = planner.choose(request).unwrap();
                prop_assert_eq!(choices.candidate[index], plain.map_or(-1, |choice| choice.candidate as i32));
                let (ttft, exact) = plain.map_or((f64::NAN, f64::NAN), |choice| (choice.ttft_s, choice.exact_ttft_s));
                prop_assert_eq!(choices.ttft_s[index].to_bits(), ttft.to_bits());
                prop_assert_eq!(choices.exact_ttft_s[index].to_bits(), exact.to_bits());
            }
        }
    }

    #[test]
    fn the_quick_way_decides_what_is_not_close() {
        let policy = Policy {
            maps: vec![Maps { split: 15, features: 1, fused_rank: None, gates: vec![gate(Tier::Speed, 0.01)] }],
            ..policy()
        };
        let planner = Planner::new(&shape(), policy).unwrap();
        // Candidate 1 is the quality tier, which nobody has measured.
        let clear = |request: &Request| matches!(planner.look(request).unwrap(), Look::Clear(Some((2, ..))));
        let asked = request(8192, Sensitivity::Latency, None);
        let ttft = planner.choose(&asked).unwrap().unwrap().ttft_s;
        assert!(clear(&asked));
        // In time by a millionth: still clear. By a billionth of a billionth: not.
        let with = |target| request(8192, Sensitivity::Balanced, Some(target));
        assert!(clear(&with(ttft * (1.0 + 1e-6))));
        assert!(matches!(planner.look(&with(ttft)).unwrap(), Look::Unclear));
        assert_eq!((less(1.0, 2.0), less(2.0, 1.0), less(1.0, 1.0)), (Some(true), Some(false), None));
        assert_eq!((less(f64::NAN, 1.0), less(f64::INFINITY, f64::INFINITY)), (None, None));
    }
}
