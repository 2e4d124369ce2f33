//! One variant per failure; the message names file and tensor.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

/// The result of everything in this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// A failure and where it was found.
#[derive(Debug)]
pub struct Error {
    /// What is wrong.
    pub fault: Fault,
    /// The file, once it is known.
    pub path: Option<PathBuf>,
    /// The tensor, when the failure is about one.
    pub tensor: Option<String>,
    /// Whether the file was being written: then the caller's arguments are at fault, and the file is not damaged.
    pub writing: bool,
}

/// The branch of the exception tree a failure belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Class {
    /// The container is malformed: `MapFormatError`.
    Format,
    /// The container is sound, its content is no map file: `MapSchemaError`.
    Schema,
    /// The maps belong to another model: `MapMismatchError`.
    Mismatch,
    /// An argument of the rule or the cost, or a model's config, makes no sense: `ScheduleError`.
    Schedule,
    /// A request or a policy that makes no sense, or that no plan can meet: `PlanError`.
    Plan,
    /// The operating system's own error: `OSError`.
    Io,
}

/// Everything that can go wrong, one variant each.
#[derive(Debug)]
#[allow(missing_docs)] // the fields are the numbers that the message shows
pub enum Fault {
    // The container.
    NotRegular { found: &'static str },
    TooShort { bytes: u64 },
    HeaderTooLarge { bytes: u64 },
    HeaderPastEnd { header_bytes: u64, file_bytes: u64 },
    NotUtf8 { at: usize },
    Json { at: usize, expected: &'static str },
    WrongType { at: usize, what: &'static str, expected: &'static str },
    DuplicateTensor,
    DuplicateMetadataKey { key: String },
    DuplicateField { field: String },
    UnknownField { field: String },
    MissingField { field: &'static str },
    NameTooLong { at: usize },
    TooManyTensors,
    TooManyMetadataKeys,
    MetadataTooLarge,
    UnknownDtype { found: String },
    TooManyDimensions,
    Dimension { found: u64 },
    Offsets { start: u64, end: u64 },
    SizeMismatch { expected: Option<u64>, found: u64 },
    Gap { expected: u64, found: u64 },
    Overlap { expected: u64, found: u64 },
    Truncated { expected: u64, found: u64 },
    TrailingBytes { expected: u64, found: u64 },
    MisalignedData { start: u64 },
    MisalignedTensor { start: u64, element_bytes: u64 },
    NonFinite { dtype: &'static str, index: u64 },
    ReservedName,
    // Map-file version 1.
    MissingKey { key: &'static str },
    UnknownKey { key: String },
    BadValue { key: &'static str, what: String },
    BadFeature { what: String },
    MissingTensor,
    UnexpectedTensor,
    TensorDtype { found: &'static str, expected: &'static str },
    TensorShape { found: Vec<u64>, expected: String },
    // The fingerprint.
    Mismatch { field: &'static str, found: String, expected: String },
    // A model's config or the description of its layers.
    Config { field: Box<str>, found: Box<str>, expected: Box<str> }, // Strings would grow every Result
    UnknownModelType { found: String, known: Vec<&'static str> },
    // The rule and the cost.
    Schedule { what: String },
    // The planner.
    Plan { what: String },
    // The operating system.
    Io(io::Error),
}

impl Fault {
    /// Returns the stable word for this failure; tests, tools and `error.kind` in Python use it.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::NotRegular { .. } => "not_regular",
            Self::TooShort { .. } => "too_short",
            Self::HeaderTooLarge { .. } => "header_too_large",
            Self::HeaderPastEnd { .. } => "header_past_end",
            Self::NotUtf8 { .. } => "not_utf8",
            Self::Json { .. } => "json",
            Self::WrongType { .. } => "wrong_type",
            Self::DuplicateTensor => "duplicate_tensor",
            Self::DuplicateMetadataKey { .. } => "duplicate_metadata_key",
            Self::DuplicateField { .. } => "duplicate_field",
            Self::UnknownField { .. } => "unknown_field",
            Self::MissingField { .. } => "missing_field",
            Self::NameTooLong { .. } => "name_too_long",
            Self::TooManyTensors => "too_many_tensors",
            Self::TooManyMetadataKeys => "too_many_metadata_keys",
            Self::MetadataTooLarge => "metadata_too_large",
            Self::UnknownDtype { .. } => "unknown_dtype",
            Self::TooManyDimensions => "too_many_dimensions",
            Self::Dimension { .. } => "dimension",
            Self::Offsets { .. } => "offsets",
            Self::SizeMismatch { .. } => "size_mismatch",
            Self::Gap { .. } => "gap",
            Self::Overlap { .. } => "overlap",
            Self::Truncated { .. } => "truncated",
            Self::TrailingBytes { .. } => "trailing_bytes",
            Self::MisalignedData { .. } => "misaligned_data",
            Self::MisalignedTensor { .. } => "misaligned_tensor",
            Self::NonFinite { .. } => "non_finite",
            Self::ReservedName => "reserved_name",
            Self::MissingKey { .. } => "missing_key",
            Self::UnknownKey { .. } => "unknown_key",
            Self::BadValue { key, .. } => key,
            Self::BadFeature { .. } => "features",
            Self::MissingTensor => "missing_tensor",
            Self::UnexpectedTensor => "unexpected_tensor",
            Self::TensorDtype { .. } => "tensor_dtype",
            Self::TensorShape { .. } => "tensor_shape",
            Self::Mismatch { field, .. } => field,
            Self::Config { .. } => "config",
            Self::UnknownModelType { .. } => "model_type",
            Self::Schedule { .. } => "schedule",
            Self::Plan { .. } => "plan",
            Self::Io(_) => "io",
        }
    }

    /// Returns the branch of the exception tree.
    pub fn class(&self) -> Class {
        match self {
            Self::MissingKey { .. }
            | Self::UnknownKey { .. }
            | Self::BadValue { .. }
            | Self::BadFeature { .. }
            | Self::MissingTensor
            | Self::UnexpectedTensor
            | Self::TensorDtype { .. }
            | Self::TensorShape { .. } => Class::Schema,
            Self::Mismatch { .. } => Class::Mismatch,
            Self::Config { .. } | Self::UnknownModelType { .. } | Self::Schedule { .. } => Class::Schedule,
            Self::Plan { .. } => Class::Plan,
            Self::Io(_) => Class::Io,
            _ => Class::Format,
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        use crate::header as cap;
        match self {
            Self::NotRegular { found } => write!(f, "is {found}; expected a regular file"),
            Self::TooShort { bytes } => {
                write!(f, "has {bytes} bytes; a safetensors file starts with an 8-byte header length")
            }
            Self::HeaderTooLarge { bytes } => {
                write!(f, "declares a header of {bytes} bytes; at most {} are read", cap::MAX_HEADER_BYTES)
            }
            Self::HeaderPastEnd { header_bytes, file_bytes } => {
                write!(f, "declares a header of {header_bytes} bytes, which ends past the file's {file_bytes}")
            }
            Self::NotUtf8 { at } => write!(f, "header byte {at} is not UTF-8"),
            Self::Json { at, expected } => write!(f, "header byte {at} is not valid JSON: expected {expected}"),
            Self::WrongType { at, what, expected } => write!(f, "header byte {at}: {what} must be {expected}"),
            Self::DuplicateTensor => write!(f, "is listed twice"),
            Self::DuplicateMetadataKey { key } => write!(f, "metadata key {} is given twice", quoted(key)),
            Self::DuplicateField { field } => write!(f, "field {} is given twice", quoted(field)),
            Self::UnknownField { field } => {
                write!(f, "field {} is unknown; expected dtype, shape and data_offsets", quoted(field))
            }
            Self::MissingField { field } => write!(f, "field {field:?} is missing"),
            Self::NameTooLong { at } => {
                write!(f, "header byte {at}: a name or key is longer than {} bytes", cap::MAX_NAME_BYTES)
            }
            Self::TooManyTensors => write!(f, "holds more than {} tensors", cap::MAX_TENSORS),
            Self::TooManyMetadataKeys => write!(f, "holds more than {} metadata keys", cap::MAX_METADATA_KEYS),
            Self::MetadataTooLarge => write!(f, "metadata is larger than {} bytes", cap::MAX_METADATA_BYTES),
            Self::UnknownDtype { found } => {
                write!(f, "dtype {} is unknown; expected one of {}", quoted(found), cap::Dtype::NAMES.join(", "))
            }
            Self::TooManyDimensions => write!(f, "has more than {} dimensions", cap::MAX_DIMENSIONS),
            Self::Dimension { found } => {
                write!(f, "has a dimension of {found}; at most {} is read", cap::MAX_DIMENSION)
            }
            Self::Offsets { start, end } => write!(f, "data_offsets [{start}, {end}] run backwards"),
            Self::SizeMismatch { expected: Some(expected), found } => {
                write!(f, "data_offsets span {found} bytes; its dtype and shape need {expected}")
            }
            Self::SizeMismatch { expected: None, found } => {
                write!(f, "data_offsets span {found} bytes; its dtype and shape need more than 2^64")
            }
            Self::Gap { expected, found } => {
                write!(f, "starts at data byte {found}, but the tensor before it ends at {expected}: a gap")
            }
            Self::Overlap { expected, found } => {
                write!(f, "starts at data byte {found}, but the tensor before it ends at {expected}: an overlap")
            }
            Self::Truncated { expected, found } => {
                write!(f, "data section has {found} bytes; its tensors need {expected}")
            }
            Self::TrailingBytes { expected, found } => {
                write!(f, "data section has {found} bytes; its tensors end at {expected}")
            }
            Self::MisalignedData { start } => {
                write!(f, "data section starts at byte {start}; expected a multiple of 8 (pad the header with spaces)")
            }
            Self::MisalignedTensor { start, element_bytes } => {
                write!(f, "starts at data byte {start}; expected a multiple of its element size, {element_bytes}")
            }
            Self::NonFinite { dtype, index } => {
                write!(f, "{dtype} element {index} is NaN or infinite; every value must be finite")
            }
            Self::ReservedName => write!(f, "is a reserved name; choose another"),
            Self::MissingKey { key } => write!(f, "metadata key {key:?} is missing"),
            Self::UnknownKey { key } => {
                write!(f, "metadata key {} is unknown; keys of your own start with \"x_\"", quoted(key))
            }
            Self::BadValue { key, what } => write!(f, "metadata key {key:?}: {what}"),
            Self::BadFeature { what } => write!(f, "metadata key \"splits\": features: {what}"),
            Self::MissingTensor => write!(f, "is missing, though \"splits\" lists its layer"),
            Self::UnexpectedTensor => write!(f, "has no place among the tensors of the layers that \"splits\" lists"),
            Self::TensorDtype { found, expected } => write!(f, "has dtype {found}; expected {expected}"),
            Self::TensorShape { found, expected } => write!(f, "has shape {found:?}; expected {expected}"),
            Self::Mismatch { field, found, expected } => write!(
                f,
                "{field}: the model has {found}, the maps were fitted for {expected}; \
                 attach them to that model, or fit maps for this one with `ridgefill fit`"
            ),
            Self::Config { field, found, expected } => write!(f, "{field} is {found}; expected {expected}"),
            Self::UnknownModelType { found, known } => write!(
                f,
                "model_type {} is unknown; known are {}; describe the layers of any other model in JSON and pass it with \
                 --layers (docs/layers.md)",
                quoted(found),
                known.join(", ")
            ),
            Self::Schedule { what } | Self::Plan { what } => write!(f, "{what}"),
            Self::Io(error) => write!(f, "{error}"),
        }
    }
}

impl Error {
    /// Returns the stable word for this failure.
    pub fn kind(&self) -> &'static str {
        self.fault.kind()
    }

    /// Returns the error with the file it was found in; a file named earlier stays.
    #[must_use]
    pub fn in_file(mut self, path: &Path) -> Self {
        self.path.get_or_insert_with(|| path.to_owned());
        self
    }

    /// Returns the error with the tensor it was found in; a tensor named earlier stays.
    #[must_use]
    pub fn in_tensor(mut self, name: &str) -> Self {
        self.tensor.get_or_insert_with(|| name.to_owned());
        self
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(path) = &self.path {
            write!(f, "{}: ", path.display())?;
        }
        if let Some(tensor) = &self.tensor {
            write!(f, "tensor {}: ", quoted(tensor))?;
        }
        self.fault.fmt(f)?;
        match self.fault.class() {
            Class::Format if self.path.is_some() && !self.writing => {
                write!(
                    f,
                    " (the file is damaged or is not a map file: copy it again, or write it with `ridgefill fit`)"
                )
            }
            Class::Schema if self.path.is_some() => {
                write!(f, " (docs/map-format.md describes map files; write one with `ridgefill fit`)")
            }
            _ => Ok(()),
        }
    }
}

impl std::error::Error for Error {}

impl From<Fault> for Error {
    fn from(fault: Fault) -> Self {
        Self { fault, path: None, tensor: None, writing: false }
    }
}

impl From<io::Error> for Error {
    fn from(error: io::Error) -> Self {
        Fault::Io(error).into()
    }
}

/// Returns text from a file, quoted, escaped and cut to 80 characters: a message must stay readable whatever a file holds.
pub(crate) fn quoted(text: &str) -> String {
    match text.char_indices().nth(80) {
        Some((cut, _)) => format!("{:?}…", &text[..cut]),
        None => format!("{text:?}"),
    }
}
