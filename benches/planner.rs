//! What planning costs: the rule, a schedule, plans by the one, the thousand and the million, and the search over every
//! split of a 128-layer model. The bar: a million plans in under a second on one core.

use std::hint::black_box;
use std::time::Instant;

use criterion::{BatchSize, Criterion, Throughput};
use ridgefill_core::cost::{Rates, Setting, Shape};
use ridgefill_core::family::Model;
use ridgefill_core::plan::{Gate, Maps, Planner, Policy, Request, Sensitivity, Tier, Trace, search};
use ridgefill_core::rule::{Step, decide};
use ridgefill_core::schedule::LayerSchedule;

const MILLION: usize = 1_000_000;

/// A model of Llama 3.1 8B's widths; every fourth layer sees all keys, the others a window of 4,096, where asked for.
fn model(layers: usize, windows: bool) -> Model {
    let layer = |index: usize| {
        let window = if windows && index % 4 != 3 { r#","window":4096"# } else { "" };
        format!(
            r#"{{"mixer":{{"kind":"attention","num_attention_heads":32,"num_key_value_heads":8,"head_dim":128{window}}},
            "mlp":{{"kind":"dense","intermediate_size":14336}}}}"#
        )
    };
    let layers: Vec<String> = (0..layers).map(layer).collect();
    let json =
        format!(r#"{{"model_type":"bench","hidden_size":4096,"vocab_size":128256,"layers":[{}]}}"#, layers.join(","));
    Model::from_description(&json).expect("the description is sound")
}

/// Three splits, two tiers each: seven candidates with `exact`.
fn policy() -> Policy {
    let gates = |loss| {
        vec![
            Gate { tier: Tier::Quality, dnll: loss / 4.0, tail: None, share: Some(0.1) },
            Gate { tier: Tier::Speed, dnll: loss, tail: None, share: None },
        ]
    };
    let mut policy = Policy::from_json(r#"{"loss_budget_nats": 1.0, "memory_budget_bytes": 4e10}"#).expect("sound");
    policy.rates = Rates::of_device("h100").expect("known");
    policy.maps = [(12, 0.2), (16, 0.08), (24, 0.02)]
        .map(|(split, loss)| Maps { split, features: 1, fused_rank: None, gates: gates(loss) })
        .to_vec();
    policy
}

/// Lengths from 100 to 200,000, spread by a linear congruential generator.
fn prompts(count: usize) -> Vec<i64> {
    let mut state = 1u64;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        100 + (state >> 33) as i64 % 199_901
    };
    (0..count).map(|_| next()).collect()
}

fn main() {
    let mut criterion = Criterion::default().configure_from_args();
    let step = Step {
        cached_tokens: 0,
        step_tokens: 32_768,
        n_ahead: 0,
        tail: 512,
        head: 4,
        min_bulk: 256,
        tile: 1,
        logits_to_keep: 1,
    };
    criterion.bench_function("rule", |bench| bench.iter(|| decide(black_box(&step))));
    let llama = model(32, true);
    criterion.bench_function("schedule of 32 layers", |bench| {
        bench.iter(|| LayerSchedule::new(black_box(&llama), 16, 512, 4, 1, None));
    });

    let planner = Planner::new(&Shape::of_model(&llama), policy()).expect("the policy is sound");
    let request = Request {
        prompt_tokens: 32_768,
        sensitivity: Sensitivity::Latency,
        ttft_target_s: Some(1.0),
        ..Request::default()
    };
    criterion.bench_function("choose one of 7 candidates", |bench| {
        bench.iter(|| planner.choose(black_box(&request)));
    });
    criterion.bench_function("plan one, with reasons", |bench| bench.iter(|| planner.plan(black_box(&request))));
    let all = prompts(MILLION);
    let mut group = criterion.benchmark_group("trace");
    for count in [1000, MILLION] {
        let trace = Trace { prompt_tokens: &all[..count], ..Trace::default() };
        group.throughput(Throughput::Elements(count as u64));
        if count == MILLION {
            group.sample_size(10);
        }
        group.bench_function(count.to_string(), |bench| {
            bench.iter_batched(|| trace, |trace| planner.choose_all(&trace), BatchSize::PerIteration);
        });
    }
    group.finish();

    let deep = Shape::of_model(&model(128, true));
    let rates = Rates::of_device("h100").expect("known");
    criterion.bench_function("search over 128 splits", |bench| {
        bench.iter(|| search(black_box(&deep), &Setting::default(), &step, Some(&rates), &[(64, 0.05)], Some(0.1)));
    });
    criterion.final_summary();

    // The bar, timed by itself so that it can fail: a million plans from a latency-sensitive trace, nothing skipped.
    let latency = vec![0; MILLION];
    let trace = Trace { prompt_tokens: &all, sensitivity: Some(&latency), ..Trace::default() };
    let started = Instant::now();
    let choices = planner.choose_all(&trace).expect("the trace is sound");
    let seconds = started.elapsed().as_secs_f64();
    let filled = choices.candidate.iter().filter(|candidate| **candidate > 0).count();
    assert!(filled > MILLION / 2, "{filled} of a million requests are filled: that is no measure of planning");
    println!("a million plans, {filled} of them fills: {seconds:.3} s, {:.0} ns each (bar: 1 s)", 1e3 * seconds);
    if seconds >= 1.0 && !cfg!(debug_assertions) {
        std::process::exit(1);
    }
}
