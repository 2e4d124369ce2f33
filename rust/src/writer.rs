//! The atomic write: at any kill point the path holds the old file or the new one, whole.
//!
//! A temporary file in the same folder, fsync, rename, fsync of the folder. The temporary file is removed when a
//! write fails; a killed process leaves it behind (`.ridgefill-*.tmp`), and it is safe to delete.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::{Error, Fault, Result};
use crate::header::{self, Dtype, TensorInfo};
use crate::mapfile::file_type;

/// A tensor to write.
#[derive(Debug, Clone)]
#[allow(missing_docs)]
pub struct TensorData<'a> {
    pub name: String,
    pub dtype: Dtype,
    pub shape: Vec<u64>,
    /// Little-endian elements in row-major order.
    pub bytes: &'a [u8],
}

/// The moments of a write at which tests kill it or make it fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum WriteStep {
    Created,
    HeaderWritten,
    HalfWritten,
    Written,
    Synced,
    Renamed,
    FolderSynced,
}

/// Writes a safetensors file atomically; equal arguments give equal bytes.
///
/// Everything the reader checks is checked first, non-finite values included, so no file is written that it would
/// refuse. The mode is 0666 less the umask. A symbolic link at `path` is followed, and stays.
pub fn write_map_file(path: &Path, tensors: &[TensorData<'_>], metadata: &BTreeMap<String, String>) -> Result<()> {
    write_with(path, tensors, metadata, |_| Ok(()))
}

/// `write_map_file` with a hook at each step, which only tests pass: to abort the process there, or to fail.
fn write_with(
    path: &Path,
    tensors: &[TensorData<'_>],
    metadata: &BTreeMap<String, String>,
    mut at: impl FnMut(WriteStep) -> io::Result<()>,
) -> Result<()> {
    let write = |at: &mut dyn FnMut(WriteStep) -> io::Result<()>| {
        let (head, order) = plan(tensors, metadata)?;
        let target = resolve(path)?;
        let folder = target.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let (temporary, mut file) = create_temporary(folder)?;
        let written = (|| {
            at(WriteStep::Created)?;
            file.write_all(&head)?;
            at(WriteStep::HeaderWritten)?;
            for (index, tensor) in order.iter().enumerate() {
                if index == order.len() / 2 {
                    at(WriteStep::HalfWritten)?;
                }
                file.write_all(tensor.bytes)?;
            }
            at(WriteStep::Written)?;
            file.sync_all()?; // before the rename: else a power cut can leave the new name on an empty file
            at(WriteStep::Synced)?;
            fs::rename(&temporary, &target)
        })();
        if let Err(error) = written {
            let _ = fs::remove_file(&temporary); // the first error is the one to report
            return Err(error.into());
        }
        at(WriteStep::Renamed)?;
        File::open(folder)?.sync_all()?; // makes the rename itself durable
        at(WriteStep::FolderSynced)?;
        Ok(())
    };
    write(&mut at).map_err(|error: Error| Error { writing: true, ..error.in_file(path) })
}

/// Returns the file's first bytes and the tensors in the order of their data, having checked what a reader will.
fn plan<'a, 'b>(
    tensors: &'b [TensorData<'a>],
    metadata: &BTreeMap<String, String>,
) -> Result<(Vec<u8>, Vec<&'b TensorData<'a>>)> {
    let mut order: Vec<_> = tensors.iter().collect();
    // The widest elements first, so that every tensor is aligned without padding.
    order.sort_by(|a, b| {
        (b.dtype.element_bytes(), &a.name, b.bytes.len()).cmp(&(a.dtype.element_bytes(), &b.name, a.bytes.len()))
    });
    let mut start = 0;
    let mut infos = Vec::with_capacity(order.len());
    for tensor in &order {
        if tensor.name == header::METADATA {
            return Err(Error::from(Fault::ReservedName).in_tensor(&tensor.name));
        }
        let end = start + tensor.bytes.len() as u64;
        infos.push(TensorInfo {
            name: tensor.name.clone(),
            dtype: tensor.dtype,
            shape: tensor.shape.clone(),
            start,
            end,
        });
        if let Some(index) = header::first_non_finite(tensor.dtype, tensor.bytes) {
            return Err(Error::from(Fault::NonFinite { dtype: tensor.dtype.name(), index }).in_tensor(&tensor.name));
        }
        start = end;
    }
    let head = header::encode(&infos, metadata);
    header::parse(&head[header::LENGTH_BYTES as usize..], start)?;
    Ok((head, order))
}

/// Returns the path that the new file takes: a link's target, and never the place of a folder or a device.
fn resolve(path: &Path) -> Result<PathBuf> {
    match fs::metadata(path) {
        Ok(status) if !status.is_file() => Err(Fault::NotRegular { found: file_type(status.file_type()) }.into()),
        Ok(_) => Ok(fs::canonicalize(path)?),
        Err(error) if error.kind() == io::ErrorKind::NotFound => match fs::read_link(path) {
            // A link to a file that is not there yet: relative to the link's own folder.
            Ok(target) => resolve(&path.parent().unwrap_or(Path::new("")).join(target)),
            Err(_) => Ok(path.to_owned()),
        },
        Err(error) => Err(error.into()),
    }
}

/// Creates a file that did not exist, whose name does not depend on the target's (which may be as long as allowed).
fn create_temporary(folder: &Path) -> io::Result<(PathBuf, File)> {
    static COUNTER: AtomicU64 = AtomicU64::new(0);
    loop {
        let count = COUNTER.fetch_add(1, Ordering::Relaxed);
        let path = folder.join(format!(".ridgefill-{}-{count}.tmp", std::process::id()));
        match OpenOptions::new().write(true).create_new(true).open(&path) {
            Ok(file) => return Ok((path, file)),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {} // left by a killed process of the same id
            Err(error) => return Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mapfile::MapFile;
    use std::process::Command;

    const STEPS: [WriteStep; 7] = [
        WriteStep::Created,
        WriteStep::HeaderWritten,
        WriteStep::HalfWritten,
        WriteStep::Written,
        WriteStep::Synced,
        WriteStep::Renamed,
        WriteStep::FolderSynced,
    ];
    const PATH: &str = "RIDGEFILL_TEST_PATH";
    const STEP: &str = "RIDGEFILL_TEST_STEP";

    fn write(path: &Path, value: u8, at: impl FnMut(WriteStep) -> io::Result<()>) -> Result<()> {
        let bytes = [value; 4096];
        let tensors = ["a", "b", "c"].map(|name| TensorData {
            name: name.to_owned(),
            dtype: Dtype::U8,
            shape: vec![4096],
            bytes: &bytes,
        });
        write_with(path, &tensors, &[("value".to_owned(), value.to_string())].into(), at)
    }

    /// The value a whole file holds; a torn one fails here.
    fn value_of(path: &Path) -> u8 {
        let file = MapFile::open(path, false).unwrap();
        let data = file.read().unwrap();
        assert_eq!(data.len(), 3 * 4096);
        assert!(data.iter().all(|byte| *byte == data[0]));
        assert_eq!(file.header().metadata["value"], data[0].to_string());
        data[0]
    }

    fn files_in(folder: &Path) -> usize {
        fs::read_dir(folder).unwrap().count()
    }

    fn renamed(step: WriteStep) -> bool {
        matches!(step, WriteStep::Renamed | WriteStep::FolderSynced)
    }

    #[test]
    #[ignore = "the process that `killed_at_every_step` starts and that dies"]
    fn killed_child() {
        let (path, step) = (std::env::var(PATH).unwrap(), std::env::var(STEP).unwrap());
        let at = |reached| if format!("{reached:?}") == step { std::process::abort() } else { Ok(()) };
        write(Path::new(&path), 2, at).unwrap();
    }

    #[test]
    fn killed_at_every_step() {
        for old in [true, false] {
            for step in STEPS {
                let folder = tempfile::tempdir().unwrap();
                let path = folder.path().join("maps.safetensors");
                if old {
                    write(&path, 1, |_| Ok(())).unwrap();
                }
                let child = Command::new(std::env::current_exe().unwrap())
                    .args(["--exact", "writer::tests::killed_child", "--ignored"])
                    .env(PATH, &path)
                    .env(STEP, format!("{step:?}"))
                    .output()
                    .unwrap();
                assert!(child.status.code().is_none(), "{step:?}: the child was to die of a signal: {child:?}");
                match (renamed(step), old) {
                    (true, _) => assert_eq!(value_of(&path), 2, "{step:?}"),
                    (false, true) => assert_eq!(value_of(&path), 1, "{step:?}"),
                    (false, false) => assert!(!path.exists(), "{step:?}"),
                }
                // What a killed write leaves does not stop the next one.
                write(&path, 3, |_| Ok(())).unwrap();
                assert_eq!(value_of(&path), 3);
            }
        }
    }

    #[test]
    fn a_failed_step_leaves_a_whole_file_and_nothing_else() {
        for step in STEPS {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("maps.safetensors");
            write(&path, 1, |_| Ok(())).unwrap();
            let full = |reached| if reached == step { Err(io::Error::from_raw_os_error(libc::ENOSPC)) } else { Ok(()) };
            let error = write(&path, 2, full).unwrap_err();
            assert_eq!(error.kind(), "io");
            assert_eq!(error.path.as_deref(), Some(path.as_path()));
            assert_eq!(value_of(&path), if renamed(step) { 2 } else { 1 }, "{step:?}");
            assert_eq!(files_in(folder.path()), 1, "{step:?}");
        }
    }

    #[test]
    fn the_steps_come_in_order_and_all_of_them() {
        let folder = tempfile::tempdir().unwrap();
        let mut seen = Vec::new();
        write(&folder.path().join("maps"), 1, |step| {
            seen.push(step);
            Ok(())
        })
        .unwrap();
        assert_eq!(seen, STEPS);
    }
}
