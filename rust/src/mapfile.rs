//! Open once, fstat, read that descriptor; map only on request.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use memmap2::Mmap;

use crate::error::{Fault, Result};
use crate::header::{self, FiniteCheck, Header, LENGTH_BYTES};

/// The first read of a file: what holds the header of a dozen layers.
const FIRST_BYTES: usize = 8 << 10;

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
        // Most headers come with their length in one read.
        let mut first = Vec::new();
        append_at(&file, &mut first, FIRST_BYTES.min(usize::try_from(file_bytes).unwrap_or(usize::MAX)), 0)?;
        let (prefix, _) = first.split_first_chunk::<8>().ok_or(Fault::TooShort { bytes: first.len() as u64 })?;
        let header_bytes = header::header_bytes(*prefix, file_bytes)?;
        let data_start = LENGTH_BYTES + header_bytes;
        let data_bytes = file_bytes - data_start;
        let header_end = data_start as usize; // at most 8 MiB, and no more than the file holds
        if let Some(more) = header_end.checked_sub(first.len()) {
            let at = first.len() as u64;
            append_at(&file, &mut first, more, at)?;
        }
        let header = header::parse(&first[LENGTH_BYTES as usize..header_end], data_bytes)?;
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
        let mut finite = FiniteCheck::new(&self.header);
        self.read_blocks(|data| finite.advance(data)).map_err(|error| error.in_file(&self.path))
    }

    /// Returns the data section in one allocation, its values unchecked: for who checks them where they are used.
    pub fn read_unscanned(&self) -> Result<Vec<u8>> {
        self.read_blocks(|_| Ok(())).map_err(|error| error.in_file(&self.path))
    }

    /// Reads the data section block by block; `arrived` gets all of it so far, the new block still in cache.
    fn read_blocks(&self, mut arrived: impl FnMut(&[u8]) -> Result<()>) -> Result<Vec<u8>> {
        // 1 MiB at a time: the values are still in cache for who looks at them.
        const BLOCK_BYTES: usize = 1 << 20;
        let bytes = usize::try_from(self.data_bytes).map_err(|_| io::Error::from(io::ErrorKind::OutOfMemory))?;
        let mut data = Vec::new();
        // `vec![0; bytes]` would end the process on a sparse file of a terabyte.
        data.try_reserve_exact(bytes).map_err(|_| io::Error::from(io::ErrorKind::OutOfMemory))?;
        while data.len() < bytes {
            let (at, end) = (data.len(), bytes.min(data.len() + BLOCK_BYTES));
            match &self.source {
                Source::File(file) => append_at(file, &mut data, end - at, self.data_start + at as u64)?,
                Source::Map(_) => {
                    // The file may have shrunk between fstat and the map.
                    let mapped = self.mapped().unwrap_or_default();
                    let block = mapped.get(at..end);
                    let (expected, found) = (self.data_bytes, mapped.len() as u64);
                    data.extend_from_slice(block.ok_or(Fault::Truncated { expected, found })?);
                }
            }
            arrived(&data)?;
        }
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

/// Appends `count` bytes of the file from `at` on; a file that has shrunk since fstat is a truncated one.
///
/// Straight into memory that nobody has written yet: the standard library reads at an offset only into bytes that are
/// initialised, and zeroing them first made a read of 1 MB a fifth slower than `std::fs::read`.
#[allow(unsafe_code)]
fn append_at(file: &File, data: &mut Vec<u8>, count: usize, at: u64) -> Result<()> {
    let end = data.len() + count;
    data.reserve_exact(count);
    while data.len() < end {
        let left = end - data.len();
        let offset = at + (count - left) as u64;
        let Ok(place) = libc::off_t::try_from(offset) else {
            return Err(Fault::Truncated { expected: at + count as u64, found: offset }.into());
        };
        let spare = &mut data.spare_capacity_mut()[..left];
        // SAFETY: pread writes at most `left` bytes, all of them into `spare`, which is this vector's own.
        let read = unsafe { libc::pread(file.as_raw_fd(), spare.as_mut_ptr().cast(), left, place) };
        match usize::try_from(read) {
            Ok(0) => {
                let found = file.metadata().map_or(0, |status| status.len());
                return Err(Fault::Truncated { expected: at + count as u64, found }.into());
            }
            // SAFETY: pread has just written `read` bytes from the old length on, within the capacity.
            Ok(read) => unsafe { data.set_len(data.len() + read) },
            Err(_) => {
                let error = io::Error::last_os_error();
                if error.kind() != io::ErrorKind::Interrupted {
                    return Err(error.into());
                }
            }
        }
    }
    Ok(())
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::header::{Dtype, TensorInfo};

    /// A file of one f32 tensor of ones whose header takes more than one read, and whose data more than one block.
    fn write_file(path: &Path, poison: Option<usize>) -> Vec<u8> {
        const COUNT: usize = 700_001;
        let mut data: Vec<u8> = 1f32.to_le_bytes().repeat(COUNT);
        if let Some(index) = poison {
            data[4 * index..][..4].copy_from_slice(&f32::NAN.to_le_bytes());
        }
        let tensor = TensorInfo {
            name: "ones".to_owned(),
            dtype: Dtype::F32,
            shape: vec![COUNT as u64],
            start: 0,
            end: data.len() as u64,
        };
        let metadata = [("x_long".to_owned(), "a \"quoted\" word ".repeat(FIRST_BYTES / 8))].into();
        let mut bytes = header::encode(&[tensor], &metadata);
        assert!(bytes.len() > FIRST_BYTES);
        bytes.extend_from_slice(&data);
        std::fs::write(path, bytes).unwrap();
        data
    }

    #[test]
    fn long_headers_and_many_blocks_read_as_they_were_written() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let data = write_file(&path, None);
        for map in [false, true] {
            let file = MapFile::open(&path, map).unwrap();
            assert!(file.read().unwrap() == data && file.read_unscanned().unwrap() == data);
        }
    }

    #[test]
    fn a_value_that_is_not_finite_is_found_in_whatever_block_it_lies() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        for poison in [0, 262_143, 262_144, 600_000, 700_000] {
            let data = write_file(&path, Some(poison));
            for map in [false, true] {
                let file = MapFile::open(&path, map).unwrap();
                let error = file.read().unwrap_err();
                assert!(matches!(error.fault, Fault::NonFinite { index, .. } if index == poison as u64), "{error}");
                assert_eq!((error.tensor.as_deref(), error.path.as_deref()), (Some("ones"), Some(path.as_path())));
                assert!(file.read_unscanned().unwrap() == data);
            }
        }
    }

    #[test]
    fn a_file_that_shrinks_is_truncated_and_not_read_past_its_end() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        write_file(&path, None);
        let file = MapFile::open(&path, false).unwrap();
        let bytes = std::fs::metadata(&path).unwrap().len();
        std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(bytes - 1).unwrap();
        for read in [file.read(), file.read_unscanned()] {
            let fault = read.unwrap_err().fault;
            assert!(matches!(fault, Fault::Truncated { found, .. } if found == bytes - 1), "{fault:?}");
        }
    }
}
