//! Bytes -> [`Header`]: the rules of the container, with no file and no clock.
//!
//! A safetensors file is an 8-byte little-endian header length, a JSON header, and the data section. The
//! parser below reads exactly the JSON that such a header may hold: three levels, no recursion, and no
//! allocation that its input's caps do not bound. A general JSON reader would keep the last of two equal
//! keys in silence, which is how one file comes to mean two things to two programs.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashSet};
use std::ops::{BitAnd, BitOr};

use crate::error::{Error, Fault, Result};

/// Bytes before the header: its length, little-endian.
pub const LENGTH_BYTES: u64 = 8;
/// The largest header that is read.
pub const MAX_HEADER_BYTES: u64 = 8 << 20;
/// The most tensors a file may hold.
pub const MAX_TENSORS: usize = 4096;
/// The largest dimension of a tensor.
pub const MAX_DIMENSION: u64 = 1 << 20;
/// The most dimensions of a tensor.
pub const MAX_DIMENSIONS: usize = 8;
/// The longest tensor name, metadata key or field name.
pub const MAX_NAME_BYTES: usize = 512;
/// The most metadata keys.
pub const MAX_METADATA_KEYS: usize = 256;
/// The most bytes that all metadata keys and values may hold together.
pub const MAX_METADATA_BYTES: usize = 1 << 20;
/// The data section's start is a multiple of this.
pub const DATA_ALIGNMENT: u64 = 8;

/// Room at first for a string with escapes, which is mostly JSON within the JSON: half a dozen allocations fewer.
const ESCAPED_BYTES: usize = 256;

pub(crate) const METADATA: &str = "__metadata__";

/// The element types this reader knows: those of safetensors whose elements are whole bytes of 1, 2, 4 or 8.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, non_camel_case_types)]
pub enum Dtype {
    BOOL,
    U8,
    I8,
    F8_E4M3,
    F8_E5M2,
    U16,
    I16,
    F16,
    BF16,
    U32,
    I32,
    F32,
    U64,
    I64,
    F64,
}

impl Dtype {
    const ALL: [Self; 15] = [
        Self::BOOL,
        Self::U8,
        Self::I8,
        Self::F8_E4M3,
        Self::F8_E5M2,
        Self::U16,
        Self::I16,
        Self::F16,
        Self::BF16,
        Self::U32,
        Self::I32,
        Self::F32,
        Self::U64,
        Self::I64,
        Self::F64,
    ];
    /// The names, as a header spells them.
    pub const NAMES: [&'static str; 15] = [
        "BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "U16", "I16", "F16", "BF16", "U32", "I32", "F32", "U64", "I64", "F64",
    ];

    /// Returns the type that a header's word names.
    pub fn parse(name: &str) -> Option<Self> {
        Self::NAMES.iter().position(|known| *known == name).map(|index| Self::ALL[index])
    }

    /// Returns the word for this type.
    pub fn name(self) -> &'static str {
        Self::NAMES[self as usize]
    }

    /// Returns the bytes of one element.
    pub fn element_bytes(self) -> u64 {
        match self {
            Self::BOOL | Self::U8 | Self::I8 | Self::F8_E4M3 | Self::F8_E5M2 => 1,
            Self::U16 | Self::I16 | Self::F16 | Self::BF16 => 2,
            Self::U32 | Self::I32 | Self::F32 => 4,
            Self::U64 | Self::I64 | Self::F64 => 8,
        }
    }
}

/// One tensor: `start..end` are byte offsets in the data section.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct TensorInfo {
    pub name: String,
    pub dtype: Dtype,
    pub shape: Vec<u64>,
    pub start: u64,
    pub end: u64,
}

/// A checked header; tensors are in the order of their data.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Header {
    pub metadata: BTreeMap<String, String>,
    pub tensors: Vec<TensorInfo>,
}

/// Returns the header's length from a file's first 8 bytes, checked against the file's size.
pub fn header_bytes(prefix: [u8; 8], file_bytes: u64) -> Result<u64> {
    let bytes = u64::from_le_bytes(prefix);
    if bytes > MAX_HEADER_BYTES {
        return Err(Fault::HeaderTooLarge { bytes }.into());
    }
    if bytes > file_bytes.saturating_sub(LENGTH_BYTES) {
        return Err(Fault::HeaderPastEnd { header_bytes: bytes, file_bytes }.into());
    }
    Ok(bytes)
}

/// Returns the header that `json` (everything between the length and the data) describes, with every rule of the
/// container checked that does not need the data's values.
pub fn parse(json: &[u8], data_bytes: u64) -> Result<Header> {
    let data_start = LENGTH_BYTES + json.len() as u64;
    if json.len() as u64 > MAX_HEADER_BYTES {
        return Err(Fault::HeaderTooLarge { bytes: json.len() as u64 }.into());
    }
    let text = std::str::from_utf8(json).map_err(|error| Fault::NotUtf8 { at: error.valid_up_to() })?;
    let (metadata, tensors) = parse_text(text)?;
    if !data_start.is_multiple_of(DATA_ALIGNMENT) {
        return Err(Fault::MisalignedData { start: data_start }.into());
    }
    let tensors = check_layout(tensors, data_bytes)?;
    Ok(Header { metadata, tensors })
}

/// Returns the header of a whole file held in memory and its data section, the values checked too.
pub fn parse_file(bytes: &[u8]) -> Result<(Header, &[u8])> {
    let file_bytes = bytes.len() as u64;
    let (prefix, rest) = bytes.split_first_chunk::<8>().ok_or(Fault::TooShort { bytes: file_bytes })?;
    let header_len = header_bytes(*prefix, file_bytes)? as usize; // at most 8 MiB
    let (json, data) = rest.split_at(header_len);
    let header = parse(json, data.len() as u64)?;
    check_finite(&header, data)?;
    Ok((header, data))
}

/// Returns the length and header of a file with these tensors and metadata, padded so that the data is aligned.
///
/// What comes out is parsed again by the writer, so nothing is written that the reader would refuse.
pub fn encode(tensors: &[TensorInfo], metadata: &BTreeMap<String, String>) -> Vec<u8> {
    let quote = |text: &str| serde_json::Value::from(text).to_string();
    let pairs = metadata.iter().map(|(key, value)| format!("{}:{}", quote(key), quote(value)));
    let mut members = vec![format!("{}:{{{}}}", quote(METADATA), pairs.collect::<Vec<_>>().join(","))];
    members.extend(tensors.iter().map(|tensor| {
        let shape = tensor.shape.iter().map(u64::to_string).collect::<Vec<_>>().join(",");
        let (name, dtype, start, end) = (quote(&tensor.name), tensor.dtype.name(), tensor.start, tensor.end);
        format!(r#"{name}:{{"dtype":"{dtype}","shape":[{shape}],"data_offsets":[{start},{end}]}}"#)
    }));
    let mut json = format!("{{{}}}", members.join(","));
    while !(LENGTH_BYTES + json.len() as u64).is_multiple_of(DATA_ALIGNMENT) {
        json.push(' ');
    }
    let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(json.as_bytes());
    bytes
}

/// Checks that every floating-point value of the data section is finite.
pub fn check_finite(header: &Header, data: &[u8]) -> Result<()> {
    let mut check = FiniteCheck::new(header);
    check.advance(data)?;
    match check.rest.first() {
        Some(tensor) => Err(Fault::Truncated { expected: tensor.end, found: data.len() as u64 }.into()),
        None => Ok(()),
    }
}

/// Checks values while a data section arrives: each block is looked at once, while it is still in the processor's cache.
#[derive(Debug)]
pub struct FiniteCheck<'a> {
    /// The tensors that are not checked to their end.
    rest: &'a [TensorInfo],
    checked_bytes: usize,
}

impl<'a> FiniteCheck<'a> {
    /// Returns the check of a data section of which nothing has arrived.
    pub fn new(header: &'a Header) -> Self {
        Self { rest: &header.tensors, checked_bytes: 0 }
    }

    /// Looks at what is new in `data`, the data section from its start as far as it has arrived.
    pub fn advance(&mut self, data: &[u8]) -> Result<()> {
        while let Some((tensor, after)) = self.rest.split_first() {
            // Offsets that no usize holds lie past any data there is.
            let place = |offset: u64| usize::try_from(offset).unwrap_or(usize::MAX);
            let (start, end) = (place(tensor.start), place(tensor.end));
            let from = self.checked_bytes.max(start);
            let arrived = data.get(from..end.min(data.len())).unwrap_or_default();
            if let Some(index) = first_non_finite(tensor.dtype, arrived) {
                let index = index + (from - start) as u64 / tensor.dtype.element_bytes();
                return Err(Error::from(Fault::NonFinite { dtype: tensor.dtype.name(), index }).in_tensor(&tensor.name));
            }
            // An element that has arrived in part is looked at when the rest of it is there.
            let whole = arrived.len() - arrived.len() % tensor.dtype.element_bytes() as usize;
            self.checked_bytes = from + whole;
            if end > data.len() {
                return Ok(());
            }
            self.rest = after;
        }
        Ok(())
    }
}

/// Returns the index of the first NaN or infinite element: one whose exponent bits are all set.
pub fn first_non_finite(dtype: Dtype, bytes: &[u8]) -> Option<u64> {
    // Adding the lowest bit of the exponent to the exponent alone carries into the sign's place just where all its bits
    // are set: an AND, an addition and an OR for each element, on as many at once as a register holds.
    match dtype {
        Dtype::BF16 => scan(bytes, 0x8000, |b| (u16::from_le_bytes(b) & 0x7f80) + 0x0080),
        Dtype::F16 => scan(bytes, 0x8000, |b| (u16::from_le_bytes(b) & 0x7c00) + 0x0400),
        Dtype::F32 => scan(bytes, 1 << 31, |b| (u32::from_le_bytes(b) & 0x7f80_0000) + 0x0080_0000),
        Dtype::F64 => scan(bytes, 1 << 63, |b| (u64::from_le_bytes(b) & (0x7ff << 52)) + (1 << 52)),
        Dtype::F8_E4M3 => scan(bytes, 0x80, |b: [u8; 1]| (b[0] & 0x7f) + 1), // this format has NaN and no infinity
        Dtype::F8_E5M2 => scan(bytes, 0x80, |b: [u8; 1]| (b[0] & 0x7c) + 0x04),
        _ => None,
    }
}

/// Returns the index of the first element whose `carry` reaches the bit `sign`.
fn scan<const N: usize, W>(bytes: &[u8], sign: W, carry: impl Fn([u8; N]) -> W) -> Option<u64>
where
    W: Copy + Default + PartialEq + BitAnd<Output = W> + BitOr<Output = W>,
{
    // A block without an early exit vectorises; the exact index is looked for only in a block that has one.
    const BLOCK: usize = 4096;
    let none = W::default();
    let (elements, _) = bytes.as_chunks::<N>();
    for (block_index, block) in elements.chunks(BLOCK).enumerate() {
        let all = block.iter().fold(none, |all, element| all | carry(*element));
        if all & sign != none {
            let within = block.iter().position(|element| carry(*element) & sign != none)?;
            return Some((block_index * BLOCK + within) as u64);
        }
    }
    None
}

/// Returns the tensors in the order of their data, having checked sizes, offsets and alignment.
fn check_layout(mut tensors: Vec<TensorInfo>, data_bytes: u64) -> Result<Vec<TensorInfo>> {
    tensors.sort_by(|a, b| (a.start, a.end, &a.name).cmp(&(b.start, b.end, &b.name)));
    let mut end = 0;
    for tensor in &tensors {
        check_tensor(tensor, end).map_err(|error| error.in_tensor(&tensor.name))?;
        end = tensor.end;
    }
    if end > data_bytes {
        return Err(Fault::Truncated { expected: end, found: data_bytes }.into());
    }
    if end < data_bytes {
        return Err(Fault::TrailingBytes { expected: end, found: data_bytes }.into());
    }
    Ok(tensors)
}

fn check_tensor(tensor: &TensorInfo, previous_end: u64) -> Result<()> {
    let (start, end, element_bytes) = (tensor.start, tensor.end, tensor.dtype.element_bytes());
    let found = end.checked_sub(start).ok_or(Fault::Offsets { start, end })?;
    let expected = tensor.shape.iter().try_fold(element_bytes, |bytes, dimension| bytes.checked_mul(*dimension));
    if expected != Some(found) {
        return Err(Fault::SizeMismatch { expected, found }.into());
    }
    if start > previous_end {
        return Err(Fault::Gap { expected: previous_end, found: start }.into());
    }
    if start < previous_end {
        return Err(Fault::Overlap { expected: previous_end, found: start }.into());
    }
    if !start.is_multiple_of(element_bytes) {
        return Err(Fault::MisalignedTensor { start, element_bytes }.into());
    }
    Ok(())
}

type Parsed = (BTreeMap<String, String>, Vec<TensorInfo>);

fn parse_text(text: &str) -> Result<Parsed> {
    let mut cursor = Cursor { text, at: 0 };
    let mut metadata = None;
    let mut tensors: Vec<TensorInfo> = Vec::new();
    let mut names = HashSet::new();
    if !text.starts_with('{') {
        return Err(Fault::Json { at: 0, expected: "'{'" }.into());
    }
    cursor.object("the header", |cursor, name| {
        if name == METADATA {
            if metadata.is_some() {
                return Err(Fault::DuplicateMetadataKey { key: name.into_owned() }.into());
            }
            metadata = Some(parse_metadata(cursor)?);
            return Ok(());
        }
        if !names.insert(name.clone()) {
            return Err(Error::from(Fault::DuplicateTensor).in_tensor(&name));
        }
        if tensors.len() == MAX_TENSORS {
            return Err(Fault::TooManyTensors.into());
        }
        tensors.push(parse_tensor(cursor, &name).map_err(|error| error.in_tensor(&name))?);
        Ok(())
    })?;
    cursor.skip_space();
    if cursor.at != text.len() {
        return Err(cursor.expected("the end of the header"));
    }
    Ok((metadata.unwrap_or_default(), tensors))
}

fn parse_metadata(cursor: &mut Cursor<'_>) -> Result<BTreeMap<String, String>> {
    let mut metadata = BTreeMap::new();
    let mut left = MAX_METADATA_BYTES;
    cursor.object(METADATA, |cursor, key| {
        if metadata.contains_key(key.as_ref()) {
            return Err(Fault::DuplicateMetadataKey { key: key.into_owned() }.into());
        }
        if metadata.len() == MAX_METADATA_KEYS {
            return Err(Fault::TooManyMetadataKeys.into());
        }
        left = left.checked_sub(key.len()).ok_or(Fault::MetadataTooLarge)?;
        let value = cursor.string("a metadata value", left, || Fault::MetadataTooLarge)?;
        left -= value.len();
        metadata.insert(key.into_owned(), value.into_owned());
        Ok(())
    })?;
    Ok(metadata)
}

fn parse_tensor(cursor: &mut Cursor<'_>, name: &str) -> Result<TensorInfo> {
    let (mut dtype, mut shape, mut offsets) = (None, None, None);
    cursor.object("a tensor", |cursor, field| {
        let taken = match field.as_ref() {
            "dtype" => dtype.replace(cursor.dtype()?).is_some(),
            "shape" => shape.replace(cursor.integers("shape", MAX_DIMENSIONS)?).is_some(),
            "data_offsets" => offsets.replace(cursor.integers("data_offsets", 2)?).is_some(),
            _ => return Err(Fault::UnknownField { field: field.into_owned() }.into()),
        };
        if taken { Err(Fault::DuplicateField { field: field.into_owned() }.into()) } else { Ok(()) }
    })?;
    let dtype = dtype.ok_or(Fault::MissingField { field: "dtype" })?;
    let shape = shape.ok_or(Fault::MissingField { field: "shape" })?;
    let offsets = offsets.ok_or(Fault::MissingField { field: "data_offsets" })?;
    if let Some(found) = shape.iter().copied().find(|dimension| *dimension > MAX_DIMENSION) {
        return Err(Fault::Dimension { found }.into());
    }
    let &[start, end] = offsets.as_slice() else {
        return Err(Fault::WrongType { at: cursor.at, what: "data_offsets", expected: "two integers" }.into());
    };
    Ok(TensorInfo { name: name.to_owned(), dtype, shape, start, end })
}

/// A place in the header's text, always on a character boundary.
struct Cursor<'a> {
    text: &'a str,
    at: usize,
}

impl<'a> Cursor<'a> {
    fn peek(&self) -> Option<u8> {
        self.text.as_bytes().get(self.at).copied()
    }

    fn expected(&self, expected: &'static str) -> Error {
        Fault::Json { at: self.at, expected }.into()
    }

    fn wrong_type(&self, what: &'static str, expected: &'static str) -> Error {
        match self.peek() {
            Some(_) => Fault::WrongType { at: self.at, what, expected }.into(),
            None => self.expected("a value"),
        }
    }

    fn skip_space(&mut self) {
        while matches!(self.peek(), Some(b' ' | b'\t' | b'\n' | b'\r')) {
            self.at += 1;
        }
    }

    /// Skips white space, then takes `byte` if it is next.
    fn take(&mut self, byte: u8) -> bool {
        self.skip_space();
        let found = self.peek() == Some(byte);
        self.at += usize::from(found);
        found
    }

    /// Reads an object; `member` gets each key and must read its value.
    fn object(
        &mut self,
        what: &'static str,
        mut member: impl FnMut(&mut Self, Cow<'a, str>) -> Result<()>,
    ) -> Result<()> {
        if !self.take(b'{') {
            return Err(self.wrong_type(what, "an object"));
        }
        if self.take(b'}') {
            return Ok(());
        }
        loop {
            self.skip_space();
            if self.peek() != Some(b'"') {
                return Err(self.expected("a key in quotes"));
            }
            let at = self.at;
            let key = self.string("a key", MAX_NAME_BYTES, || Fault::NameTooLong { at })?;
            if !self.take(b':') {
                return Err(self.expected("':'"));
            }
            member(self, key)?;
            if self.take(b'}') {
                return Ok(());
            }
            if !self.take(b',') {
                return Err(self.expected("',' or '}'"));
            }
        }
    }

    /// Reads a list of at most `most` unsigned integers.
    fn integers(&mut self, what: &'static str, most: usize) -> Result<Vec<u64>> {
        const EXPECTED: &str = "a list of unsigned integers below 2^64";
        if !self.take(b'[') {
            return Err(self.wrong_type(what, EXPECTED));
        }
        let mut numbers = Vec::new();
        if self.take(b']') {
            return Ok(numbers);
        }
        loop {
            self.skip_space();
            if numbers.len() == most {
                return Err(match what {
                    "shape" => Fault::TooManyDimensions.into(),
                    _ => self.wrong_type(what, "two integers"),
                });
            }
            numbers.push(self.integer().ok_or_else(|| self.wrong_type(what, EXPECTED))?);
            if self.take(b']') {
                return Ok(numbers);
            }
            if !self.take(b',') {
                return Err(self.expected("',' or ']'"));
            }
        }
    }

    /// Reads digits that JSON allows as an unsigned integer (no sign, no leading zero, no fraction or exponent).
    fn integer(&mut self) -> Option<u64> {
        let rest = &self.text[self.at..];
        let digits = &rest[..rest.bytes().take_while(u8::is_ascii_digit).count()];
        let followed_by = rest.as_bytes().get(digits.len());
        if (digits.len() > 1 && digits.starts_with('0')) || matches!(followed_by, Some(b'.' | b'e' | b'E')) {
            return None;
        }
        let number = digits.parse().ok()?;
        self.at += digits.len();
        Some(number)
    }

    fn dtype(&mut self) -> Result<Dtype> {
        let at = self.at;
        let found = self.string("dtype", MAX_NAME_BYTES, || Fault::NameTooLong { at })?;
        Dtype::parse(&found).ok_or_else(|| Fault::UnknownDtype { found: found.into_owned() }.into())
    }

    /// Reads a string of at most `most` bytes, its escapes decoded; one without escapes, as nearly all are, where it lies.
    fn string(&mut self, what: &'static str, most: usize, too_long: impl Fn() -> Fault) -> Result<Cow<'a, str>> {
        if !self.take(b'"') {
            return Err(self.wrong_type(what, "a string"));
        }
        let mut text = String::new();
        loop {
            let all: &'a str = self.text;
            let rest = &all[self.at..];
            let plain = rest.bytes().take_while(|byte| !matches!(byte, b'"' | b'\\' | 0..0x20)).count();
            if text.len() + plain > most {
                return Err(too_long().into());
            }
            let plain = &rest[..plain];
            self.at += plain.len();
            if text.is_empty() && self.peek() == Some(b'"') {
                self.at += 1;
                return Ok(Cow::Borrowed(plain));
            }
            if text.is_empty() {
                text.reserve(plain.len() + ESCAPED_BYTES);
            }
            text.push_str(plain);
            match self.peek() {
                Some(b'"') => {
                    self.at += 1;
                    return Ok(Cow::Owned(text));
                }
                Some(b'\\') => {
                    let character = self.escape().ok_or_else(|| self.expected("an escape that JSON knows"))?;
                    if text.len() + character.len_utf8() > most {
                        return Err(too_long().into());
                    }
                    text.push(character);
                }
                Some(_) => return Err(self.expected("a character that is no control character")),
                None => return Err(self.expected("the end of a string")),
            }
        }
    }

    /// Reads one escape, `\uD83D\uDE00` pairs included; a lone surrogate is none.
    fn escape(&mut self) -> Option<char> {
        let letter = *self.text.as_bytes().get(self.at + 1)?;
        self.at += 2;
        Some(match letter {
            b'"' | b'\\' | b'/' => char::from(letter),
            b'b' => '\u{8}',
            b'f' => '\u{c}',
            b'n' => '\n',
            b'r' => '\r',
            b't' => '\t',
            b'u' => {
                let high = self.hex()?;
                if (0xd800..0xdc00).contains(&high) {
                    if !self.text.as_bytes()[self.at..].starts_with(b"\\u") {
                        return None;
                    }
                    self.at += 2;
                    let low = self.hex()?;
                    char::decode_utf16([high, low]).next()?.ok()?
                } else {
                    char::from_u32(u32::from(high))?
                }
            }
            _ => return None,
        })
    }

    fn hex(&mut self) -> Option<u16> {
        let digits = self.text.as_bytes().get(self.at..self.at + 4)?;
        let value = digits.iter().try_fold(0u16, |value, digit| {
            Some(value << 4 | char::from(*digit).to_digit(16)? as u16) // a digit is below 16
        })?;
        self.at += 4;
        Some(value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use proptest::sample::Index;

    #[test]
    fn every_dtype_has_its_name_and_size() {
        for (dtype, name) in Dtype::ALL.into_iter().zip(Dtype::NAMES) {
            assert_eq!((dtype.name(), Dtype::parse(name)), (name, Some(dtype)));
            let bits =
                ["64", "32", "16"].iter().find(|bits| name.ends_with(**bits)).map_or(8, |bits| bits.parse().unwrap());
            assert_eq!(dtype.element_bytes() * 8, bits, "{name}");
        }
    }

    fn string(json: &str) -> Result<String> {
        Cursor { text: json, at: 0 }.string("a string", usize::MAX, || Fault::MetadataTooLarge).map(Cow::into_owned)
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(4096) })]

        #[test]
        fn strings_read_as_serde_json_reads_them(text in any::<String>()) {
            prop_assert_eq!(string(&serde_json::Value::from(text.as_str()).to_string()).unwrap(), text);
        }

        #[test]
        fn escapes_are_accepted_when_serde_json_accepts_them(inner in r#"([a-z"\\/bfnrtu]|\\u[dD8][89a-f0-9cC]{2}[0-9a-f]|\\[u"\\/nrtbfx]|[0-9A-F]){0,10}"#) {
            let json = format!("\"{inner}\"");
            // The cursor stops at the closing quote; serde_json must have nothing after it.
            let mut cursor = Cursor { text: &json, at: 0 };
            let ours = cursor.string("a string", usize::MAX, || Fault::MetadataTooLarge).ok().map(Cow::into_owned).filter(|_| cursor.at == json.len());
            prop_assert_eq!(ours, serde_json::from_str::<String>(&json).ok());
        }

        #[test]
        fn every_single_non_finite_bit_pattern_is_found(bits in any::<u32>(), at in 0usize..5000) {
            let non_finite = !f32::from_bits(bits).is_finite();
            let mut data = vec![0u8; 5000 * 4];
            data[at * 4..][..4].copy_from_slice(&bits.to_le_bytes());
            prop_assert_eq!(first_non_finite(Dtype::F32, &data), non_finite.then_some(at as u64));
        }

        #[test]
        fn every_wide_bit_pattern_is_judged_right(bits in prop_oneof![any::<u64>(), any::<u64>().prop_map(|b| b | 0x7ff << 52)]) {
            let non_finite = !f64::from_bits(bits).is_finite();
            prop_assert_eq!(first_non_finite(Dtype::F64, &bits.to_le_bytes()), non_finite.then_some(0));
        }

        #[test]
        fn values_that_arrive_in_pieces_are_judged_as_one(
            counts in prop::collection::vec(0usize..40, 0..6), dtypes in prop::collection::vec(any::<Index>(), 6),
            bad in prop::option::of(any::<Index>()), cuts in prop::collection::vec(any::<Index>(), 0..8),
        ) {
            let mut start = 0;
            let tensors: Vec<_> = counts.iter().zip(dtypes).map(|(count, dtype)| {
                let dtype = Dtype::ALL[dtype.index(Dtype::ALL.len())];
                let end = start + *count as u64 * dtype.element_bytes();
                let tensor = TensorInfo { name: start.to_string(), dtype, shape: vec![*count as u64], start, end };
                start = end;
                tensor
            }).collect();
            let mut data = vec![0u8; start as usize];
            if let (Some(bad), false) = (bad, data.is_empty()) {
                // All bits set from somewhere on: NaN in every floating-point type.
                let from = bad.index(data.len());
                data[from..].fill(0xff);
            }
            let header = Header { metadata: BTreeMap::new(), tensors };
            let mut ends: Vec<usize> = cuts.iter().map(|cut| cut.index(data.len() + 1)).chain([data.len()]).collect();
            ends.sort_unstable();
            let mut check = FiniteCheck::new(&header);
            let pieces = ends.iter().try_for_each(|end| check.advance(&data[..*end]));
            // One by one, the plain way.
            let plain = header.tensors.iter().find_map(|tensor| {
                let bytes = &data[tensor.start as usize..tensor.end as usize];
                first_non_finite(tensor.dtype, bytes).map(|index| (tensor.name.clone(), index))
            });
            let found = pieces.err().map(|error| match error.fault {
                Fault::NonFinite { index, .. } => (error.tensor.unwrap_or_default(), index),
                fault => panic!("{fault:?}"),
            });
            prop_assert_eq!(&found, &plain);
            prop_assert_eq!(check_finite(&header, &data).is_err(), plain.is_some());
            if let Some(last) = header.tensors.iter().rev().find(|tensor| tensor.end > tensor.start) {
                let short = check_finite(&header, &data[..last.end as usize - 1]).unwrap_err();
                let truncated = matches!(short.fault, Fault::Truncated { .. });
                prop_assert!(plain.is_some() || truncated);
            }
        }

        #[test]
        fn encoding_then_parsing_is_the_identity(
            names in prop::collection::btree_set("[^_]{0,12}", 0..8), metadata in prop::collection::btree_map(any::<String>(), any::<String>(), 0..6),
        ) {
            let mut start = 0;
            let tensors: Vec<_> = names.into_iter().enumerate().map(|(index, name)| {
                let end = start + 8 * index as u64;
                let tensor = TensorInfo { name, dtype: Dtype::F64, shape: vec![index as u64], start, end };
                start = end;
                tensor
            }).collect();
            let bytes = encode(&tensors, &metadata);
            prop_assert_eq!(parse(&bytes[8..], start).unwrap(), Header { metadata, tensors });
        }
    }

    #[test]
    fn every_short_bit_pattern_is_judged_right() {
        for bits in 0..=u16::MAX {
            let bytes = bits.to_le_bytes();
            let bf16 = f32::from_bits(u32::from(bits) << 16).is_finite();
            assert_eq!(first_non_finite(Dtype::BF16, &bytes).is_none(), bf16, "{bits:#x}");
            assert_eq!(first_non_finite(Dtype::F16, &bytes).is_none(), bits >> 10 & 0x1f != 0x1f, "{bits:#x}");
        }
        for bits in 0..=u8::MAX {
            assert_eq!(first_non_finite(Dtype::F8_E4M3, &[bits]).is_none(), bits & 0x7f != 0x7f, "{bits:#x}");
            assert_eq!(first_non_finite(Dtype::F8_E5M2, &[bits]).is_none(), bits >> 2 & 0x1f != 0x1f, "{bits:#x}");
        }
    }
}
