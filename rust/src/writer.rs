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
    write(&mut at).map_err(|error: Error| error.in_file(path))
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
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(path.to_owned()),
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
