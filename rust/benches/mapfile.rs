//! What opening, checking, reading and writing a map file cost, beside the safetensors crate on the same file with the same
//! access: map + header, and read + deserialise.
//!
//!     cargo bench --bench mapfile            all of it, then the summary
//!     cargo bench --bench mapfile -- 1KB     one size
//!     RIDGEFILL_BENCH=summary cargo bench    the summaries alone: ratios by processor time, good on a busy machine

mod paired;

use std::collections::BTreeMap;
use std::fs::File;
use std::hint::black_box;
use std::path::{Path, PathBuf};

use criterion::{Criterion, Throughput};
use memmap2::Mmap;
use ridgefill_core::header::Dtype;
use ridgefill_core::mapfile::MapFile;
use ridgefill_core::schema;
use ridgefill_core::writer::{TensorData, write_map_file};
use safetensors::SafeTensors;

/// (name, hidden size, late layers): bf16 maps of about that many bytes together.
const SIZES: [(&str, u64, u64); 3] = [("1KB", 20, 1), ("1MB", 256, 8), ("256MB", 2048, 32)];

/// Everything in a map file of one split but the values: all weights are one.
struct Content {
    metadata: BTreeMap<String, String>,
    hidden_size: u64,
    layers: u64,
    weight: Vec<u8>,
    bias: Vec<u8>,
}

impl Content {
    fn new(hidden_size: u64, layers: u64) -> Self {
        let count = layers + 1;
        let types = vec!["\"full_attention\""; count as usize].join(",");
        let model = format!(
            r#"{{"model_type":"llama","name":"bench","hidden_size":{hidden_size},"num_hidden_layers":{count},
            "num_attention_heads":4,"num_key_value_heads":2,"head_dim":4,"vocab_size":100,"layer_types":[{types}],
            "sliding_window":null,"rope":{{"rope_theta":10000.0}},"quantization":null,"anchors":null,"tokenizer":null}}"#
        );
        let metrics =
            r#"{"input_cosine":0.98,"key_cosine":0.97,"value_cosine":0.91,"key_cosine_quantiles":[0.1,0.5,0.9]}"#;
        let entries: Vec<String> =
            (1..count).map(|layer| format!(r#"{{"layer":{layer},"metrics":{metrics}}}"#)).collect();
        let splits = format!(
            r#"[{{"split":0,"features":["stream"],"target":"normalized","lambda":0.001,"layers":[{}]}}]"#,
            entries.join(",")
        );
        let metadata = [
            ("format", "ridgefill"),
            ("version", "1"),
            ("credit", "see NOTICE"),
            ("model", &model),
            ("fit", r#"{"rows":9,"held_out_rows":0,"head":4,"window_tokens":16,"texts":[]}"#),
            ("splits", &splits),
            ("default_split", "0"),
        ];
        Self {
            metadata: metadata.map(|(key, value)| (key.to_owned(), value.to_owned())).into(),
            hidden_size,
            layers,
            weight: [0x80, 0x3f].repeat((hidden_size * hidden_size) as usize),
            bias: vec![0; 4 * hidden_size as usize],
        }
    }

    fn write(&self, path: &Path) {
        let mut tensors = Vec::new();
        for layer in 1..=self.layers {
            let stem = format!("split.0.layer.{layer}");
            let (d, name) = (self.hidden_size, |part: &str| format!("{stem}.{part}"));
            let (weight, bias) = (self.weight.as_slice(), self.bias.as_slice());
            tensors.push(TensorData { name: name("weight"), dtype: Dtype::BF16, shape: vec![d, d], bytes: weight });
            tensors.push(TensorData { name: name("bias"), dtype: Dtype::F32, shape: vec![d], bytes: bias });
        }
        write_map_file(path, &tensors, &self.metadata).expect("a valid map file");
    }
}

/// Maps a file, checks its header in full, and counts its tensors.
fn map_ours(path: &Path) -> usize {
    MapFile::open(path, true).expect("a sound file").header().tensors.len()
}

/// The same, and what the metadata and the tensors must say.
fn map_ours_with_schema(path: &Path) -> usize {
    let file = MapFile::open(path, true).expect("a sound file");
    schema::validate(file.header()).expect("a map file").splits.len()
}

#[allow(unsafe_code)]
fn map_file(path: &Path) -> Mmap {
    // SAFETY: the file is this process's own, in a folder that nobody else knows.
    unsafe { Mmap::map(&File::open(path).expect("a file")) }.expect("a map")
}

fn map_theirs(path: &Path) -> usize {
    let map = map_file(path);
    SafeTensors::deserialize(&map).expect("a sound file").len()
}

/// Reads a file and checks its header; its values are not looked at.
fn read_ours(path: &Path) -> usize {
    MapFile::open(path, false).and_then(|file| file.read_unscanned()).expect("a sound file").len()
}

/// The same, and every value is finite.
fn read_and_scan_ours(path: &Path) -> usize {
    MapFile::open(path, false).and_then(|file| file.read()).expect("a sound file").len()
}

fn read_theirs(path: &Path) -> usize {
    let bytes = std::fs::read(path).expect("a file");
    SafeTensors::deserialize(&bytes).expect("a sound file").len();
    bytes.len()
}

/// What memory can deliver to one core: the sum of the file as 64-bit integers.
fn sum(bytes: &[u8]) -> u64 {
    bytes.as_chunks::<8>().0.iter().fold(0, |sum, word| sum.wrapping_add(u64::from_le_bytes(*word)))
}

fn benches(criterion: &mut Criterion, files: &[(&str, PathBuf)], folder: &Path) {
    for (name, path) in files {
        let bytes = std::fs::metadata(path).expect("a file").len();
        let mut group = criterion.benchmark_group(*name);
        group.throughput(Throughput::Bytes(bytes));
        if bytes > 1 << 24 {
            group.sample_size(10);
        }
        group.bench_function("map + header", |bencher| bencher.iter(|| map_ours(path)));
        group.bench_function("map + header + schema", |bencher| bencher.iter(|| map_ours_with_schema(path)));
        group.bench_function("map + header: safetensors", |bencher| bencher.iter(|| map_theirs(path)));
        group.bench_function("read", |bencher| bencher.iter(|| read_ours(path)));
        group.bench_function("read + scan", |bencher| bencher.iter(|| read_and_scan_ours(path)));
        group.bench_function("read: safetensors", |bencher| bencher.iter(|| read_theirs(path)));
        let mapped = MapFile::open(path, true).expect("a sound file");
        group.bench_function("scan", |bencher| bencher.iter(|| mapped.check_mapped()));
        group.bench_function("sum", |bencher| bencher.iter(|| sum(black_box(mapped.mapped().unwrap_or_default()))));
        group.finish();
    }
    let content = Content::new(256, 8);
    let path = folder.join("written.safetensors");
    criterion.bench_function("write 1MB", |bencher| bencher.iter(|| content.write(&path)));
}

/// Checks that both readers see the same bytes, then times each pair in turn.
fn summary(files: &[(&str, PathBuf)]) {
    for (name, path) in files {
        let ours = MapFile::open(path, false).expect("a sound file");
        let (data, whole) = (ours.read().expect("finite values"), std::fs::read(path).expect("a file"));
        let theirs = SafeTensors::deserialize(&whole).expect("a sound file");
        assert_eq!(ours.header().tensors.len(), theirs.len());
        for tensor in &ours.header().tensors {
            let bytes = &data[tensor.start as usize..tensor.end as usize];
            assert!(bytes == theirs.tensor(&tensor.name).expect("the same tensors").data(), "{}", tensor.name);
        }
        drop(theirs);

        let (rounds, calls) = if whole.len() > 1 << 24 { (15, 1) } else { (51, 20) };
        let line = |what: &str, pair: &paired::Pair, bar: &str| {
            println!(
                "summary: {name:>5} {what}: {:.1} us beside {:.1} us, ratio {:.3}{bar}",
                1e6 * pair.first_s,
                1e6 * pair.second_s,
                pair.ratio
            );
        };
        let mapped = paired::in_turn(rounds, 20, || map_ours(path), || map_theirs(path));
        line("map + header / safetensors", &mapped, " (bar: at most 1)");
        let mapped = paired::in_turn(rounds, 20, || map_ours_with_schema(path), || map_theirs(path));
        line("map + header + schema / safetensors", &mapped, "");
        let read = paired::in_turn(rounds, calls, || read_ours(path), || read_theirs(path));
        line("read / safetensors", &read, " (bar: at most 1)");
        let read = paired::in_turn(rounds, calls, || read_and_scan_ours(path), || read_theirs(path));
        line("read + scan / safetensors", &read, "");
        let file = MapFile::open(path, true).expect("a sound file");
        let bytes = file.mapped().unwrap_or_default();
        let scan = paired::in_turn(rounds, calls, || file.check_mapped(), || sum(black_box(bytes)));
        let gigabytes = |seconds: f64| bytes.len() as f64 / seconds / 1e9;
        println!(
            "summary: {name:>5} scan {:.1} GB/s beside a plain sum's {:.1} GB/s, {:.2} of it{}",
            gigabytes(scan.first_s),
            gigabytes(scan.second_s),
            1.0 / scan.ratio,
            // Smaller files lie in the processor's cache: their sums say nothing about memory.
            if bytes.len() > 1 << 27 { " (bar: at least 0.5)" } else { ", from cache" }
        );
    }
}

fn main() {
    let folder = tempfile::tempdir().expect("a folder");
    let files = SIZES.map(|(name, hidden_size, layers)| {
        let path = folder.path().join(format!("{name}.safetensors"));
        Content::new(hidden_size, layers).write(&path);
        (name, path)
    });
    if !paired::only_summary() {
        let mut criterion = Criterion::default().configure_from_args();
        benches(&mut criterion, &files, folder.path());
        criterion.final_summary();
    }
    if paired::summary_wanted() {
        summary(&files);
    }
}
