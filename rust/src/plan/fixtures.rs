//! The model, policy and requests that tests plan with.

use proptest::prelude::*;

use super::{Gate, Maps, Planner, Policy, Request, Sensitivity, Tier};
use crate::cost::{Rates, Shape};

pub(crate) fn shape() -> Shape {
    let layer =
        r#"{"num_attention_heads":9,"num_key_value_heads":3,"head_dim":64,"mlp_flops_per_row":5308416,"window":null}"#;
    let layers = vec![layer; 30].join(",");
    Shape::from_json(&format!(r#"{{"hidden_size":576,"vocab_size":49152,"layers":[{layers}]}}"#)).unwrap()
}

pub(crate) fn gate(tier: Tier, dnll: f64) -> Gate {
    Gate { tier, dnll, tail: None, share: None }
}

pub(crate) fn maps(split: usize, gates: Vec<Gate>) -> Maps {
    Maps { split, features: 1, fused_rank: None, gates }
}

pub(crate) fn policy() -> Policy {
    Policy {
        rates: Rates {
            matmul_flops_per_s: 1e12,
            attention_flops_per_s: 5e11,
            masked_attention_flops_per_s: None,
            memory_bytes_per_s: 1e11,
            weight_bytes_per_s: None,
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

pub(crate) fn request(prompt_tokens: u64, sensitivity: Sensitivity, ttft_target_s: Option<f64>) -> Request {
    Request { prompt_tokens, sensitivity, ttft_target_s, ..Request::default() }
}

pub(crate) fn any_maps() -> impl Strategy<Value = Vec<Maps>> {
    let gate = (any::<bool>(), 0.0f64..0.5, 1u64..2000, 0.01f64..1.0).prop_map(|(speed, dnll, tail, share)| Gate {
        tier: if speed { Tier::Speed } else { Tier::Quality },
        dnll,
        tail: Some(tail),
        share: (!speed).then_some(share),
    });
    prop::collection::btree_map(0usize..30, prop::collection::vec(gate, 0..4), 0..4)
        .prop_map(|all| all.into_iter().map(|(split, gates)| maps(split, gates)).collect())
}

pub(crate) fn any_request() -> impl Strategy<Value = Request> {
    let sensitivity = prop_oneof![Just(Sensitivity::Latency), Just(Sensitivity::Balanced), Just(Sensitivity::Accuracy)];
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

pub(crate) fn chosen(policy: Policy, request: &Request) -> Option<(f64, f64)> {
    let planner = Planner::new(&shape(), policy).unwrap();
    let choice = planner.choose(request).unwrap()?;
    Some((choice.ttft_s, planner.candidates()[choice.candidate].loss_nats.unwrap()))
}
