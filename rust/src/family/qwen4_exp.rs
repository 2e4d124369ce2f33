//! The reader of qwen4_exp: residual streams side by side, indexed attention, n-gram embeddings inside layers.

use super::config::Config;
use super::families::Base;
use super::hybrid::{gated_attention, gated_delta, is_attention, shared_experts};
use super::{Attention, Indexer, Layer, Mixer, Mlp, Model};
use crate::error::Result;

/// The most residual streams that are believed.
const MAX_STREAMS: u64 = 64;
/// The largest smallest table of n-grams that is believed (the class's default is 20,000,000).
const MAX_TABLE: u64 = 1 << 28;
/// The most tables of n-grams that are believed, all layers together: each costs a search for a prime.
const MAX_TABLES: u64 = 1024;

/// qwen4_exp.
pub(super) fn read(config: &Config<'_>, base: &Base) -> Result<Model> {
    let d = base.hidden_size;
    let streams = config.count("hc_count", 4)?;
    if !(2..=MAX_STREAMS).contains(&streams) {
        return Err(config.unexpected("hc_count", format!("a whole number, 2 to {MAX_STREAMS}")));
    }
    let (wide, rank) = (streams * d, config.count("hc_lowrank", 320)?);
    // Qwen4ExpTextGatedResidual: mix weights down and up, and one injection weight for each stream.
    let connection = 2 * wide * rank + wide * streams;

    // Released configs say full_attention for layers that have an indexer (Qwen4ExpTextConfig.__post_init__).
    let kinds = is_attention(config, base, &["indexed_attention", "full_attention", "linear_attention"])?;
    let indexer = if kinds.contains(&true) { Some(indexer(config)?) } else { None };
    let gains = indexer.as_ref().map_or(0, |indexer| 2 * indexer.head_dim);
    let attention = gated_attention(config, base)?;
    let attention = Attention { extra_parameters: attention.extra_parameters + gains, indexer, ..attention };
    let delta = gated_delta(config)?;
    let mlp = Mlp::Moe(shared_experts(config, 512, 10)?);

    let mut layers: Vec<Layer> = kinds
        .iter()
        .map(|&is_attention| {
            let mixer =
                if is_attention { Mixer::Attention(attention.clone()) } else { Mixer::GatedDelta(delta.clone()) };
            // Both connections norm all streams; the layer has no other norm.
            Layer { extra_weights: 2 * connection, ..base.layer(mixer, mlp.clone(), 2 * streams) }
        })
        .collect();
    add_ngrams(config, base, streams, &kinds, &mut layers)?;

    let mut model = base.model(layers);
    model.residual_streams = streams;
    model.extra_weights = 2 * wide * rank; // the last connection injects nothing
    model.extra_parameters = wide; // its norm, in place of a final one
    Ok(model)
}

fn indexer(config: &Config<'_>) -> Result<Indexer> {
    let field = |name: &str| match config.optional(name, None)? {
        Some(value) => Ok(value),
        None => Err(config.unexpected(name, "a whole number, since layers have indexed attention")),
    };
    if field("indexer_kv_heads")? != 1 {
        return Err(config.unexpected("indexer_kv_heads", "1"));
    }
    let indexer = Indexer {
        num_heads: field("indexer_n_heads")?,
        head_dim: field("indexer_head_dim")?,
        budget: field("indexer_budget")?,
        compress_ratio: field("indexer_compress_ratio")?,
    };
    if indexer.budget.is_multiple_of(indexer.compress_ratio) {
        return Ok(indexer);
    }
    let expected = format!("a multiple of indexer_compress_ratio, which is {}", indexer.compress_ratio);
    Err(config.unexpected("indexer_budget", expected))
}

/// Adds the n-gram embeddings of the layers in `ple_layer_ids`, which count from 1 (Qwen4ExpTextPLELayer).
fn add_ngrams(
    config: &Config<'_>,
    base: &Base,
    streams: u64,
    is_attention: &[bool],
    layers: &mut [Layer],
) -> Result<()> {
    let mut ids = config.indices("ple_layer_ids", base.layers as u64 + 1)?.unwrap_or_default();
    ids.sort_unstable();
    ids.dedup();
    if ids.is_empty() {
        return Ok(());
    }
    if ids[0] == 0 || ids.iter().any(|&id| is_attention[id as usize - 1]) {
        return Err(config.unexpected("ple_layer_ids", "layers counted from 1, all of them linear_attention"));
    }
    let (d, wide) = (base.hidden_size, streams * base.hidden_size);
    let width = config.optional("ple_embed_dim", None)?.unwrap_or(d);
    let ngram = config.count("ngram_size", 3)?;
    let kernel = config.count("ple_conv_kernel_size", 4)?;
    let tables = (ngram - 1) * config.count("heads_per_ngram", 8)?;
    if tables == 0 || tables * ids.len() as u64 > MAX_TABLES || !width.is_multiple_of(tables) {
        let expected =
            format!("a multiple of its {tables} tables of n-grams, of which there may be {MAX_TABLES} in all");
        return Err(config.conflict("ple_embed_dim", width.to_string(), expected));
    }
    let smallest = match config.get("ngram_vocab_size_base").map(serde_json::Value::as_u64) {
        None => 20_000_000,
        Some(Some(smallest)) if (1..=MAX_TABLE).contains(&smallest) => smallest,
        Some(_) => {
            return Err(config.unexpected("ngram_vocab_size_base", format!("a whole number, 1 to {MAX_TABLE}")));
        }
    };
    let divisor = config.count("make_ngram_vocab_size_divisible_by", 128)?;
    // Each table has a prime number of rows, the next one up from the table before, on through all layers.
    let mut primes = (smallest..).filter(|&number| is_prime(number));
    for id in ids {
        let rows: u64 = primes.by_ref().take(tables as usize).sum();
        let table = rows.div_ceil(divisor) * divisor * (width / tables);
        let layer = &mut layers[id as usize - 1];
        layer.extra_weights += width * (wide + d) + wide * kernel; // keys, values; the dilated convolution
        layer.extra_parameters += 3 * wide + table;
        // The convolution's rows, dilated by the n-gram; the last token ids.
        layer.extra_states = vec![vec![wide, (kernel - 1) * ngram], vec![ngram - 1]];
    }
    Ok(())
}

fn is_prime(number: u64) -> bool {
    let divisors = (2..).take_while(|divisor| divisor * divisor <= number);
    number >= 2 && divisors.into_iter().all(|divisor| !number.is_multiple_of(divisor))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn primes_are_prime() {
        let primes: Vec<u64> = (0..32).filter(|&number| is_prime(number)).collect();
        assert_eq!(primes, [2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31]);
        assert_eq!((20_000_000..).find(|&number| is_prime(number)), Some(20_000_003));
    }
}
