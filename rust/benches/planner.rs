//! What the pure parts cost: the rule, a schedule, the search over every split, and plans one by one and by the million.
//!
//!     cargo bench --bench planner              all of it, then the summary
//!     cargo bench --bench planner -- million   one of them
//!     RIDGEFILL_BENCH=summary cargo bench      the summaries alone: ratios by processor time, good on a busy machine

mod paired;

use std::hint::black_box;

use criterion::{Criterion, Throughput};
use ridgefill_core::cost::{Rates, Setting, Shape};
use ridgefill_core::family::Model;
use ridgefill_core::plan::{Choices, Gate, Maps, Planner, Policy, Request, Sensitivity, Tier, Trace, search};
use ridgefill_core::rule::{Step, decide};
use ridgefill_core::schedule::LayerSchedule;

/// A Llama of 8 billion parameters in shape, of so many layers.
fn model(layers: usize) -> Model {
    let json = format!(
        r#"{{"model_type":"llama","hidden_size":4096,"vocab_size":128256,"layers":[{{"count":{layers},
        "mixer":{{"kind":"attention","num_attention_heads":32,"num_key_value_heads":8,"head_dim":128}},
        "mlp":{{"kind":"dense","intermediate_size":14336}}}}]}}"#
    );
    Model::from_description(&json).expect("the description is one")
}

/// A planner with three splits, each measured in both tiers: seven candidates.
fn planner() -> Planner {
    let gates = |speed: f64| {
        vec![
            Gate { tier: Tier::Quality, dnll: speed / 4.0, tail: None, share: Some(0.1) },
            Gate { tier: Tier::Speed, dnll: speed, tail: None, share: None },
        ]
    };
    let maps = [(12, 0.2), (16, 0.04), (20, 0.02)].map(|(split, speed)| Maps {
        split,
        features: 1,
        fused_rank: Some(128),
        gates: gates(speed),
    });
    let policy = Policy {
        rates: Rates::of_device("h100").expect("a known device"),
        maps: maps.into(),
        memory_budget_bytes: Some(40e9),
        ..Policy::from_json(r#"{"loss_budget_nats": 0.25}"#).expect("a policy")
    };
    Planner::new(&Shape::of_model(&model(32)), policy).expect("a planner")
}

/// A trace as a server sees it: lengths from 64 to 262,144 tokens (uniform in their logarithm), half of them with a cached
/// prefix, every sensitivity, half of the requests with a target.
struct Requests {
    prompt_tokens: Vec<i64>,
    cached_tokens: Vec<i64>,
    output_tokens: Vec<i64>,
    sensitivity: Vec<u8>,
    ttft_target_s: Vec<f64>,
}

impl Requests {
    fn new(count: usize) -> Self {
        // xorshift64*: the same trace on every machine.
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        let mut uniform = move || {
            state ^= state >> 12;
            state ^= state << 25;
            state ^= state >> 27;
            (state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 11) as f64 / (1u64 << 53) as f64
        };
        let mut all = Self {
            prompt_tokens: Vec::with_capacity(count),
            cached_tokens: Vec::with_capacity(count),
            output_tokens: Vec::with_capacity(count),
            sensitivity: Vec::with_capacity(count),
            ttft_target_s: Vec::with_capacity(count),
        };
        for _ in 0..count {
            let prompt = (6.0 + 12.0 * uniform()).exp2();
            let cached = if uniform() < 0.5 { 0.0 } else { prompt * uniform() * 0.9 };
            all.prompt_tokens.push(prompt as i64);
            all.cached_tokens.push(cached as i64);
            all.output_tokens.push((2048.0 * uniform()) as i64);
            all.sensitivity.push((3.0 * uniform()) as u8);
            all.ttft_target_s.push(if uniform() < 0.5 { f64::NAN } else { 4.0 * uniform() + 1e-3 });
        }
        all
    }

    fn trace(&self) -> Trace<'_> {
        Trace {
            prompt_tokens: &self.prompt_tokens,
            cached_tokens: Some(&self.cached_tokens),
            output_tokens: Some(&self.output_tokens),
            sensitivity: Some(&self.sensitivity),
            ttft_target_s: Some(&self.ttft_target_s),
        }
    }
}

/// The trace planned request by request with the plain [`Planner::choose`]: what `choose_all` must equal.
fn one_by_one(planner: &Planner, requests: &[Request]) -> Choices {
    let mut choices = Choices::default();
    for request in requests {
        let choice = planner.choose(request).expect("a request");
        choices.candidate.push(choice.map_or(-1, |choice| choice.candidate as i32));
        choices.ttft_s.push(choice.map_or(f64::NAN, |choice| choice.ttft_s));
        choices.exact_ttft_s.push(choice.map_or(f64::NAN, |choice| choice.exact_ttft_s));
    }
    choices
}

fn step(step_tokens: u64) -> Step {
    Step { cached_tokens: 0, step_tokens, n_ahead: 0, tail: 512, head: 4, min_bulk: 256, tile: 1, logits_to_keep: 1 }
}

fn benches(criterion: &mut Criterion) {
    criterion.bench_function("rule", |bencher| bencher.iter(|| decide(black_box(&step(8192)))));
    let deep = model(128);
    criterion.bench_function("schedule of 128 layers", |bencher| {
        bencher.iter(|| LayerSchedule::new(black_box(&deep), 64, 512, 4, 1, None));
    });
    let (shape, rates) = (Shape::of_model(&deep), Rates::of_device("h100").expect("a known device"));
    criterion.bench_function("search over all splits of 128 layers", |bencher| {
        bencher.iter(|| search(black_box(&shape), &Setting::default(), &step(32_768), Some(&rates), &[], None));
    });

    let planner = planner();
    let request = Request { prompt_tokens: 32_768, sensitivity: Sensitivity::Balanced, ..Request::default() };
    criterion.bench_function("plan: one, in words", |bencher| bencher.iter(|| planner.plan(black_box(&request))));
    criterion.bench_function("plan: one, chosen", |bencher| bencher.iter(|| planner.choose(black_box(&request))));
    for (name, count, samples) in [("a thousand", 1000, 50), ("a million", 1_000_000, 10)] {
        let requests = Requests::new(count);
        let mut group = criterion.benchmark_group("plan");
        group.throughput(Throughput::Elements(count as u64)).sample_size(samples);
        group.bench_function(name, |bencher| bencher.iter(|| planner.choose_all(black_box(&requests.trace()))));
        group.finish();
    }
}

/// Checks that the million equals its requests one by one, then times both in turn.
fn summary() {
    let (planner, all) = (planner(), Requests::new(1_000_000));
    let requests: Vec<Request> = (0..all.prompt_tokens.len())
        .map(|index| Request {
            prompt_tokens: all.prompt_tokens[index] as u64,
            cached_tokens: all.cached_tokens[index] as u64,
            output_tokens: all.output_tokens[index] as u64,
            sensitivity: [Sensitivity::Latency, Sensitivity::Balanced, Sensitivity::Accuracy]
                [usize::from(all.sensitivity[index])],
            ttft_target_s: Some(all.ttft_target_s[index]).filter(|target| !target.is_nan()),
            exact_spans: Vec::new(),
        })
        .collect();
    let (fast, plain) = (planner.choose_all(&all.trace()).expect("a trace"), one_by_one(&planner, &requests));
    // NaN stands where no plan fits, and is not equal to itself.
    let bits = |values: &[f64]| values.iter().map(|value| value.to_bits()).collect::<Vec<u64>>();
    assert_eq!(fast.candidate, plain.candidate);
    assert_eq!(bits(&fast.ttft_s), bits(&plain.ttft_s));
    assert_eq!(bits(&fast.exact_ttft_s), bits(&plain.exact_ttft_s));
    let filled = fast.candidate.iter().filter(|candidate| **candidate > 0).count();
    let pair = paired::in_turn(5, 1, || planner.choose_all(&all.trace()), || one_by_one(&planner, &requests));
    println!(
        "summary: a million plans, {} candidates, {filled} fills, equal to one by one",
        planner.candidates().len()
    );
    println!(
        "summary: choose_all {:.3} s, one by one {:.3} s, ratio {:.3} (bar: 1 s on one core)",
        pair.first_s, pair.second_s, pair.ratio
    );
}

fn main() {
    if !paired::only_summary() {
        let mut criterion = Criterion::default().configure_from_args();
        benches(&mut criterion);
        criterion.final_summary();
    }
    if paired::summary_wanted() {
        summary();
    }
}
