//! Open once, fstat, read that descriptor; map only on request.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use memmap2::Mmap;

use crate::error::{Error, Fault, Result};
use crate::header::{self, Header, LENGTH_BYTES};

/// An open, checked safetensors file; only the data's values are still unread.
#[derive(Debug)]
pub struct MapFile {
    path: PathBuf,
    header: Header,
    data_start: u64,
    data_bytes: u64,
    source: Source,
}

#[derive(Debug)]
enum Source {
    File(File),
    Map(Mmap),
}

impl MapFile {
    /// Opens a file and checks everything but the data's values.
    ///
    /// The path is opened once, and what is checked is what is read: a file swapped in between cannot slip by.
    /// Opening never blocks (a FIFO is refused, not waited for). `map` maps the file instead of reading it: less
    /// memory, but if another process then truncates the file, touching the lost part kills this process.
    pub fn open(path: &Path, map: bool) -> Result<Self> {
        Self::open_inner(path, map).map_err(|error| error.in_file(path))
    }

    fn open_inner(path: &Path, map: bool) -> Result<Self> {
        let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path)?;
        let status = file.metadata()?;
        if !status.is_file() {
            return Err(Fault::NotRegular { found: file_type(status.file_type()) }.into());
        }
        let file_bytes = status.len();
        if file_bytes < LENGTH_BYTES {
            return Err(Fault::TooShort { bytes: file_bytes }.into());
        }
        let mut prefix = [0; 8];
        read_at(&file, &mut prefix, 0)?;
        let header_bytes = header::header_bytes(prefix, file_bytes)?;
        let data_start = LENGTH_BYTES + header_bytes;
        let data_bytes = file_bytes - data_start;
        let mut json = vec![0; header_bytes as usize]; // at most 8 MiB, and no more than the file holds
        read_at(&file, &mut json, LENGTH_BYTES)?;
        let header = header::parse(&json, data_bytes)?;
        let source = if map { Source::Map(map_file(&file)?) } else { Source::File(file) };
        Ok(Self { path: path.to_owned(), header, data_start, data_bytes, source })
    }

    /// Returns the path as given to `open`.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the checked header.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// Returns the size of the data section in bytes.
    pub fn data_bytes(&self) -> u64 {
        self.data_bytes
    }

    /// Returns the data section in one allocation, having refused non-finite values.
    pub fn read(&self) -> Result<Vec<u8>> {
        self.read_inner().map_err(|error| error.in_file(&self.path))
    }

    fn read_inner(&self) -> Result<Vec<u8>> {
        // 1 MiB at a time, so that the zeroes that `resize` writes are still in cache when they are replaced.
        const BLOCK_BYTES: usize = 1 << 20;
        let bytes = usize::try_from(self.data_bytes).map_err(|_| io::Error::from(io::ErrorKind::OutOfMemory))?;
        let mut data = Vec::new();
        // `vec![0; bytes]` would end the process on a sparse file of a terabyte.
        data.try_reserve_exact(bytes).map_err(|_| io::Error::from(io::ErrorKind::OutOfMemory))?;
        match &self.source {
            Source::File(file) => {
                while data.len() < bytes {
                    let at = data.len();
                    data.resize(bytes.min(at + BLOCK_BYTES), 0);
                    read_at(file, &mut data[at..], self.data_start + at as u64)?;
                }
            }
            Source::Map(_) => data.extend_from_slice(self.mapped().unwrap_or_default()),
        }
        header::check_finite(&self.header, &data)?;
        Ok(data)
    }

    /// Returns the mapped data section, unchecked for non-finite values, or None for a file that is not mapped.
    pub fn mapped(&self) -> Option<&[u8]> {
        match &self.source {
            Source::Map(map) => map.get(usize::try_from(self.data_start).ok()?..),
            Source::File(_) => None,
        }
    }

    /// Refuses non-finite values in a mapped file.
    pub fn check_mapped(&self) -> Result<()> {
        let data = self.mapped().unwrap_or_default();
        header::check_finite(&self.header, data).map_err(|error| error.in_file(&self.path))
    }
}

/// Fills `buffer` from `at`; a file that has shrunk since fstat is a truncated one.
fn read_at(file: &File, buffer: &mut [u8], at: u64) -> Result<()> {
    file.read_exact_at(buffer, at).map_err(|error| match error.kind() {
        io::ErrorKind::UnexpectedEof => {
            let found = file.metadata().map_or(0, |status| status.len());
            Error::from(Fault::Truncated { expected: at + buffer.len() as u64, found })
        }
        _ => error.into(),
    })
}

#[allow(unsafe_code)]
fn map_file(file: &File) -> Result<Mmap> {
    // SAFETY: the map is private and read-only, and its bytes are only ever read as plain integers, so no write
    // by another process can break an invariant of this one. Truncation raises SIGBUS, which no process can
    // rule out for a file it does not own: the caller asked for it, and `open` says so.
    Ok(unsafe { Mmap::map(file)? })
}

pub(crate) fn file_type(kind: std::fs::FileType) -> &'static str {
    if kind.is_dir() {
        "a folder"
    } else if kind.is_fifo() {
        "a FIFO"
    } else if kind.is_socket() {
        "a socket"
    } else {
        "a device"
    }
}
