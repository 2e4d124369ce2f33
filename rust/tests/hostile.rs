//! Whatever bytes come in: no panic, no more memory than the input and 16 MiB, and nothing accepted that safetensors
//! refuses or reads otherwise. `PROPTEST_CASES` sets the number of mutated files (a million: about a minute).

use std::alloc::{GlobalAlloc, Layout, System};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use proptest::prelude::*;
use proptest::sample::Index;
use proptest::test_runner::{Config, TestRunner};
use ridgefill_core::error::Error;
use ridgefill_core::header::{self, Dtype, Header, TensorInfo};
use ridgefill_core::schema;

/// The system's allocator with a high-water mark. The two tests of this file share it, so it is run by one of them.
struct Counting;

static NOW: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call goes to the system's allocator unchanged; only counters are added.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        PEAK.fetch_max(NOW.fetch_add(layout.size(), Relaxed) + layout.size(), Relaxed);
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        NOW.fetch_sub(layout.size(), Relaxed);
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const SLACK_BYTES: usize = 16 << 20;

/// Returns what `work` gives and the most bytes it held beyond what was held before.
fn peak_of<T>(work: impl FnOnce() -> T) -> (T, usize) {
    let before = NOW.load(Relaxed);
    PEAK.store(before, Relaxed);
    let result = work();
    (result, PEAK.load(Relaxed) - before)
}

/// The path that a file's bytes take: container, values, schema, and the document handed to Python. An accepted
/// container comes with the schema's error, if it is no map file.
fn read_all(bytes: &[u8]) -> Result<(Header, Option<Error>), Error> {
    let (header, _) = header::parse_file(bytes)?;
    let error = schema::validate(&header).and_then(|schema| schema.to_json()).err();
    Ok((header, error))
}

fn metadata() -> BTreeMap<String, String> {
    let hash = "0123456789abcdef".repeat(4);
    let model = format!(
        r#"{{"model_type":"llama","name":"tiny","hidden_size":4,"num_hidden_layers":4,"num_attention_heads":2,"num_key_value_heads":1,"head_dim":2,"vocab_size":16,"layer_types":["full_attention","full_attention","sliding_attention","full_attention"],"sliding_window":8,"rope":{{"rope_theta":10000.0,"factor":[1,2.5]}},"quantization":null,"anchors":"{hash}","tokenizer":null}}"#
    );
    let fit = format!(
        r#"{{"rows":10,"held_out_rows":2,"head":4,"window_tokens":8,"texts":[{{"name":"a","sha256":"{hash}","rows":10}}]}}"#
    );
    let splits = r#"[{"split":1,"features":["stream","previous:1"],"target":"normalized","lambda":0.001,"layers":[{"layer":2,"metrics":{"cos":0.9,"q":[0.1,0.2]}},{"layer":3,"metrics":{}}]},{"split":2,"features":["stream"],"target":"raw","lambda":0.01,"layers":[{"layer":3,"metrics":{}}]}]"#;
    [
        ("format", "ridgefill"),
        ("version", "1"),
        ("credit", "its authors"),
        ("model", &model),
        ("fit", &fit),
        ("splits", splits),
        ("default_split", "2"),
        ("gate", r#"{"passed":true}"#),
        ("x_note", "caf\u{e9} \u{1f600}\u{1}"),
    ]
    .map(|(key, value)| (key.to_owned(), value.to_owned()))
    .into()
}

/// A valid map file with weights of the given type; of codes some are factors.
fn valid_file(weight: Dtype) -> Vec<u8> {
    let mut tensors = Vec::new();
    let mut start = 0;
    let mut push = |name: &str, dtype: Dtype, shape: &[u64]| {
        let end = start + shape.iter().product::<u64>() * dtype.element_bytes();
        tensors.push(TensorInfo { name: name.to_owned(), dtype, shape: shape.to_vec(), start, end });
        start = end;
    };
    for (stem, inputs) in [("split.1.layer.2", 8), ("split.1.layer.3", 8), ("split.2.layer.3", 4)] {
        push(&format!("{stem}.bias"), Dtype::F32, &[4]);
        if weight == Dtype::I8 {
            // Scales first, so that each tensor is aligned.
            let parts: &[(&str, u64, u64)] =
                if inputs == 4 { &[("weight", 4, 4)] } else { &[("weight_in", 8, 2), ("weight_out", 2, 4)] };
            for (part, rows, columns) in parts {
                push(&format!("{stem}.{part}_scales"), Dtype::BF16, &[rows.div_ceil(128), *columns]);
            }
            for (part, rows, columns) in parts {
                push(&format!("{stem}.{part}"), Dtype::I8, &[*rows, *columns]);
            }
        } else {
            push(&format!("{stem}.weight"), weight, &[inputs, 4]);
        }
    }
    let mut bytes = header::encode(&tensors, &metadata());
    // Small finite numbers in every format: no byte above 0x3f in a high place.
    bytes.extend((0..start).map(|index| (index * 7 % 0x40) as u8));
    bytes
}

/// One change to a file.
#[derive(Debug, Clone)]
enum Change {
    Flip(Index, u8),
    Truncate(Index),
    Remove(Index, usize),
    Insert(Index, &'static str),
    Copy(Index, Index, usize),
    Splice(Index, Index),
    Length(u64),
    Digit(Index, u8),
}

const TOKENS: [&str; 22] = [
    "{",
    "}",
    "[",
    "]",
    ",",
    ":",
    "\"",
    "\\",
    "\\u0000",
    "\\ud800",
    "null",
    "-1",
    "0",
    "99999999999999999999",
    "1e9",
    "\"dtype\":\"F32\",",
    "\"__metadata__\":{},",
    "\"a\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]},",
    "BF16",
    "NaN",
    " ",
    "[[[[[[[[[[[[[[[[",
];

fn change() -> impl Strategy<Value = Change> {
    prop_oneof![
        4 => (any::<Index>(), 1u8..).prop_map(|(at, mask)| Change::Flip(at, mask)),
        1 => any::<Index>().prop_map(Change::Truncate),
        2 => (any::<Index>(), 1usize..64).prop_map(|(at, bytes)| Change::Remove(at, bytes)),
        4 => (any::<Index>(), prop::sample::select(&TOKENS[..])).prop_map(|(at, token)| Change::Insert(at, token)),
        2 => (any::<Index>(), any::<Index>(), 1usize..200).prop_map(|(from, to, bytes)| Change::Copy(from, to, bytes)),
        1 => (any::<Index>(), any::<Index>()).prop_map(|(cut, from)| Change::Splice(cut, from)),
        1 => prop_oneof![0u64..4096, any::<u64>()].prop_map(Change::Length),
        4 => (any::<Index>(), b'0'..=b'9').prop_map(|(at, digit)| Change::Digit(at, digit)),
    ]
}

fn apply(bytes: &mut Vec<u8>, change: &Change, other: &[u8]) {
    if bytes.is_empty() {
        return;
    }
    let len = bytes.len();
    match *change {
        Change::Flip(at, mask) => bytes[at.index(len)] ^= mask,
        Change::Truncate(at) => bytes.truncate(at.index(len)),
        Change::Remove(at, count) => drop(bytes.drain(at.index(len)..len.min(at.index(len) + count))),
        Change::Insert(at, token) => drop(bytes.splice(at.index(len)..at.index(len), token.bytes())),
        Change::Copy(from, to, count) => {
            let piece = bytes[from.index(len)..len.min(from.index(len) + count)].to_vec();
            bytes.splice(to.index(len)..to.index(len), piece);
        }
        Change::Splice(cut, from) => {
            bytes.truncate(cut.index(len));
            bytes.extend_from_slice(&other[from.index(other.len())..]);
        }
        Change::Length(length) => {
            let length = length.to_le_bytes();
            bytes.iter_mut().zip(length).for_each(|(byte, new)| *byte = new);
        }
        Change::Digit(at, digit) => {
            // Digits are where sizes and offsets live: the next one from here is replaced.
            if let Some(found) = bytes.iter_mut().skip(at.index(len)).find(|byte| byte.is_ascii_digit()) {
                *found = digit;
            }
        }
    }
}

/// Sets the header's length to what the data needs, so that a change in the middle is met by more than the first check.
fn repair_length(bytes: &mut [u8], data_bytes: usize) {
    if let Some(length) = bytes.len().checked_sub(8 + data_bytes) {
        bytes[..8].copy_from_slice(&(length as u64).to_le_bytes());
    }
}

fn check(bytes: &[u8], accepted: &mut u64) {
    let (result, peak) = peak_of(|| read_all(bytes));
    assert!(peak <= bytes.len() + SLACK_BYTES, "{peak} bytes held for a file of {}", bytes.len());
    let Ok((ours, _)) = result else { return };
    *accepted += 1;
    let theirs = safetensors::SafeTensors::deserialize(bytes).expect("accepted here, so safetensors must accept it");
    let data = &header::parse_file(bytes).unwrap().1;
    assert_eq!(theirs.len(), ours.tensors.len());
    for tensor in &ours.tensors {
        let view = theirs.tensor(&tensor.name).expect("the same names");
        assert_eq!(view.data(), &data[tensor.start as usize..tensor.end as usize]);
        assert_eq!(view.shape(), tensor.shape.iter().map(|size| *size as usize).collect::<Vec<_>>());
        assert_eq!(format!("{:?}", view.dtype()), tensor.dtype.name());
    }
    let (_, theirs) = safetensors::SafeTensors::read_metadata(bytes).unwrap();
    let theirs = theirs.metadata().clone().unwrap_or_default();
    assert_eq!(theirs.into_iter().collect::<BTreeMap<_, _>>(), ours.metadata);
}

/// Headers built to make a reader allocate, each as large as the caps allow or larger, and the kind that ends it (so
/// that a greedy document is known to reach the code that parses it).
fn greedy_headers() -> Vec<(&'static str, &'static str, Vec<u8>)> {
    const BIG: usize = 8 << 20;
    let file = |json: String| {
        let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
        bytes.extend_from_slice(json.as_bytes());
        bytes
    };
    let fill = |start: &str, unit: &str, end: &str, total: usize| {
        format!("{start}{}{end}", unit.repeat((total - start.len() - end.len()) / unit.len()))
    };
    let with_key = |key: &str, value: String| {
        let mut metadata = metadata();
        metadata.insert(key.to_owned(), value);
        header::encode(&[], &metadata)
    };
    let model = metadata()["model"].clone();
    let (fit, splits) = (metadata()["fit"].clone(), metadata()["splits"].clone());
    // Almost all of the metadata's 1 MiB, and of the 128 KiB of a free document.
    let (most, free) = (1_000_000, 127_000);
    let list = |unit: &str, end: &str, total: usize| fill("[", unit, end, total);
    let pairs = |count: usize, value: &str| {
        (0..count).map(|index| format!("\"{index}\":{value}")).collect::<Vec<_>>().join(",")
    };
    let first = |text: &str, from: &str, to: String| text.replacen(from, &to, 1);
    vec![
        (
            "a shape of millions",
            "too_many_dimensions",
            file(fill(r#"{"a":{"dtype":"U8","shape":["#, "0,", "0]}}", BIG)),
        ),
        ("offsets of millions", "wrong_type", file(fill(r#"{"a":{"data_offsets":["#, "0,", "0]}}", BIG))),
        ("one long name", "name_too_long", file(fill("{\"", "a", "\":1}", BIG))),
        ("one long value", "metadata_too_large", file(fill(r#"{"__metadata__":{"a":""#, "a", "\"}}", BIG))),
        ("escapes", "metadata_too_large", file(fill(r#"{"__metadata__":{"a":""#, "\\u0041", "\"}}", BIG))),
        ("many keys", "too_many_metadata_keys", file(format!("{{\"__metadata__\":{{{}}}}}", pairs(500_000, "\"\"")))),
        (
            "many tensors",
            "too_many_tensors",
            file(format!("{{{}}}", pairs(130_000, r#"{"dtype":"U8","shape":[0],"data_offsets":[0,0]}"#))),
        ),
        ("deep nesting", "wrong_type", file(fill("{\"a\":", "[", "", BIG))),
        ("white space", "missing_key", file(fill("{", " ", "}", BIG))),
        ("a length of 2^63", "header_too_large", (1u64 << 63).to_le_bytes().to_vec()),
        ("a length beyond the file", "header_past_end", (4u64 << 20).to_le_bytes().to_vec()),
        ("rope of numbers", "missing_tensor", with_key("model", first(&model, "10000.0", list("0,", "0]", free)))),
        ("rope of lists", "missing_tensor", with_key("model", first(&model, "10000.0", list("[],", "0]", free)))),
        ("rope, deep", "model", with_key("model", first(&model, "10000.0", "[".repeat(free)))),
        ("a gate of keys", "missing_tensor", with_key("gate", format!("{{{}}}", pairs(14_000, "0")))),
        (
            "layer types",
            "model",
            with_key(
                "model",
                first(&model, "[\"full_attention\"", fill("", "\"\",", "\"\"", free).replacen('"', "[\"", 1)),
            ),
        ),
        (
            "texts",
            "fit",
            with_key(
                "fit",
                first(&fit, "\"texts\":[", fill("\"texts\":[", r#"{"name":"","sha256":"","rows":0},"#, "", most)),
            ),
        ),
        ("metrics, a list", "missing_tensor", with_key("splits", first(&splits, "[0.1,0.2]", list("0,", "0]", most)))),
        ("metrics, names", "missing_tensor", with_key("splits", first(&splits, "\"cos\":0.9", pairs(100_000, "0")))),
        ("metrics, lists", "missing_tensor", with_key("splits", first(&splits, "\"cos\":0.9", pairs(80_000, "[0]")))),
        (
            "layers",
            "splits",
            with_key(
                "splits",
                first(&splits, "\"layers\":[", fill("\"layers\":[", r#"{"layer":1,"metrics":{}},"#, "", most)),
            ),
        ),
        (
            "splits",
            "splits",
            with_key("splits", list(r#"{"split":1,"features":[],"target":"raw","lambda":1,"layers":[]},"#, "0]", most)),
        ),
        ("features", "splits", with_key("splits", first(&splits, "\"stream\"", fill("", "\"\",", "\"\"", most)))),
    ]
}

#[test]
fn hostile_files() {
    // One test: the high-water mark is the process's.
    for (name, kind, bytes) in greedy_headers() {
        let (found, peak) = peak_of(|| read_all(&bytes));
        println!("{name}: {} bytes in, {peak} at the peak", bytes.len());
        assert_eq!(
            found.map_or_else(|error| error.kind(), |(_, schema)| schema.map_or("", |error| error.kind())),
            kind,
            "{name}"
        );
        assert!(peak <= bytes.len() + SLACK_BYTES, "{name}: {peak} bytes held for a file of {}", bytes.len());
    }
    let (_, peak) = peak_of(|| vec![0u8; SLACK_BYTES + 1]);
    assert!(peak > SLACK_BYTES, "the high-water mark sees an allocation over the bound");

    let seeds = [Dtype::BF16, Dtype::F16, Dtype::F32, Dtype::I8].map(valid_file);
    let mut accepted = 0;
    for seed in &seeds {
        check(seed, &mut accepted);
        schema::validate(&header::parse_file(seed).unwrap().0).unwrap();
    }
    assert_eq!(accepted, seeds.len() as u64);

    // Config's default reads PROPTEST_CASES; the crate's own default of 256 is too few here.
    let cases = std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(5_000);
    let mut runner = TestRunner::new(Config { cases, failure_persistence: None, ..Config::default() });
    let strategy = (0..seeds.len(), 0..seeds.len(), prop::collection::vec(change(), 1..4), any::<bool>());
    let accepted = std::cell::Cell::new(0);
    runner
        .run(&strategy, |(seed, other, changes, repair)| {
            let mut bytes = seeds[seed].clone();
            changes.iter().for_each(|change| apply(&mut bytes, change, &seeds[other]));
            if repair {
                let data_bytes = header::parse_file(&seeds[seed]).unwrap().1.len();
                repair_length(&mut bytes, data_bytes);
            }
            let mut count = 0;
            check(&bytes, &mut count);
            accepted.set(accepted.get() + count);
            Ok(())
        })
        .unwrap();
    println!("{cases} mutated files, {} of them accepted and read alike by safetensors", accepted.get());
    assert!(accepted.get() > u64::from(cases) / 100, "mutations that never get through test only the first check");
}
