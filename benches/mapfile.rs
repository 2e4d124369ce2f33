//! Opening, validating and reading a map file beside the safetensors crate, with the same access on both sides; and the
//! writer. Prints the ratios: 1 or more means that this crate is no slower.
//!
//! | access | this crate | safetensors |
//! |---|---|---|
//! | map | `MapFile::open(map)`, header checked | mmap, `SafeTensors::deserialize` |
//! | read | `fs::read`, header checked, no scan | `fs::read`, `SafeTensors::deserialize` |
//! | scan | `MapFile::read`: data read, every value finite | the same as read |

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::hint::black_box;
use std::path::Path;
use std::time::{Duration, Instant};

use criterion::{Criterion, Throughput};
use memmap2::Mmap;
use ridgefill_core::header::{self, Dtype};
use ridgefill_core::mapfile::MapFile;
use ridgefill_core::writer::{TensorData, write_map_file};
use safetensors::SafeTensors;

const SIZES: [(&str, usize); 3] = [("1 KB", 1 << 10), ("1 MB", 1 << 20), ("256 MB", 256 << 20)];

/// The best time of one call, kept beside criterion's statistics for the ratios.
struct Best(Duration);

impl Best {
    fn time<T>(&mut self, calls: u64, work: impl Fn() -> T) -> Duration {
        let started = Instant::now();
        for _ in 0..calls {
            black_box(work());
        }
        let elapsed = started.elapsed();
        self.0 = self.0.min(elapsed / u32::try_from(calls).unwrap_or(u32::MAX));
        elapsed
    }
}

/// Pairs of tensors as a map file has them, `bytes` of data in all.
fn tensors(bytes: &[u8]) -> Vec<TensorData<'_>> {
    let pieces = bytes.len().div_ceil(16 << 20).max(2);
    let piece = bytes.len() / pieces / 128 * 128;
    let tensor = |index: usize| TensorData {
        name: format!("split.0.layer.{index}.weight"),
        dtype: Dtype::BF16,
        shape: vec![piece as u64 / 128, 64],
        bytes: &bytes[index * piece..(index + 1) * piece],
    };
    (0..pieces).map(tensor).collect()
}

fn safetensors_mapped(path: &Path) -> usize {
    let file = File::open(path).expect("the bench's own file");
    // SAFETY: nobody else has the file, which the bench wrote a moment ago.
    let map = unsafe { Mmap::map(&file) }.expect("the bench's own file");
    SafeTensors::deserialize(&map).expect("a sound file").len()
}

fn safetensors_read(path: &Path) -> usize {
    let bytes = fs::read(path).expect("the bench's own file");
    SafeTensors::deserialize(&bytes).expect("a sound file").len()
}

fn ours_read(path: &Path) -> usize {
    let bytes = fs::read(path).expect("the bench's own file");
    let (prefix, rest) = bytes.split_first_chunk().expect("a sound file");
    let header_bytes = header::header_bytes(*prefix, bytes.len() as u64).expect("a sound file");
    let (json, data) = rest.split_at(header_bytes as usize);
    header::parse(json, data.len() as u64).expect("a sound file").tensors.len()
}

fn ours_mapped(path: &Path) -> usize {
    MapFile::open(path, true).expect("a sound file").header().tensors.len()
}

fn ours_scanned(path: &Path) -> usize {
    MapFile::open(path, false).and_then(|file| file.read()).expect("a sound file").len()
}

fn main() {
    let mut criterion = Criterion::default().configure_from_args();
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut ratios = Vec::new();
    for (word, bytes) in SIZES {
        // 1.0 in bf16, so that the scan has to look at every value.
        let data: Vec<u8> = [0x80, 0x3f].into_iter().cycle().take(bytes).collect();
        let list = tensors(&data);
        let path = folder.path().join(format!("{bytes}.safetensors"));
        write_map_file(&path, &list, &BTreeMap::new()).expect("a writable folder");
        // Before anything is timed: both sides read the same tensors.
        assert_eq!(ours_mapped(&path), safetensors_mapped(&path));
        assert_eq!(ours_mapped(&path), list.len());

        let mut group = criterion.benchmark_group(word);
        group.sample_size(if bytes > 1 << 20 { 10 } else { 50 });
        let mut run = |name: &str, work: fn(&Path) -> usize| {
            let mut best = Best(Duration::MAX);
            group.throughput(Throughput::Bytes(bytes as u64));
            group.bench_function(name, |bench| bench.iter_custom(|calls| best.time(calls, || work(&path))));
            best.0.as_secs_f64()
        };
        let map = (run("map, ridgefill", ours_mapped), run("map, safetensors", safetensors_mapped));
        let read = (run("read, ridgefill", ours_read), run("read, safetensors", safetensors_read));
        let scan = run("read and scan, ridgefill", ours_scanned);
        ratios.push(format!(
            "{word}: safetensors / ridgefill  map {:.2}  read {:.2}  read and scan {:.2}; scanned at {:.2} GB/s",
            map.1 / map.0,
            read.1 / read.0,
            read.1 / scan,
            bytes as f64 / scan / 1e9
        ));
        group.bench_function("write", |bench| {
            bench.iter(|| write_map_file(&path, &list, &BTreeMap::new()).expect("a writable folder"));
        });
        group.finish();
    }
    criterion.final_summary();
    let copied = vec![1u8; 256 << 20];
    let started = Instant::now();
    black_box(black_box(&copied).clone());
    println!("{}", ratios.join("\n"));
    println!("memory: one copy of 256 MB at {:.2} GB/s", (256 << 20) as f64 / started.elapsed().as_secs_f64() / 1e9);
}
