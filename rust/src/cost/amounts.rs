//! The parts of a prefill, and what each costs: operations and bytes.

/// What a part of the work is limited by at most.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Unit {
    Matmul,
    Attention,
}

/// The parts of a prefill; each is timed by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Part {
    /// Projections and MLPs of the head rows, in a call of their own through every layer.
    HeadMatmul,
    /// Projections and MLPs of the layers below the split, of bulk and tail rows.
    EarlyMatmul,
    /// Their attention and scans: what filling cannot help.
    EarlyAttention,
    /// Projections and MLPs of the late layers on tail rows.
    LateMatmul,
    /// Their attention and scans.
    LateAttention,
    /// Maps, and key and value projections, of bulk rows.
    Fill,
    /// Late recurrent states over bulk rows.
    FillScan,
    /// Scores of bulk rows by the tail's queries.
    Scoring,
    /// Projections and MLPs of selected rows in the late layers.
    SelectedMatmul,
    /// Their attention and scans.
    SelectedAttention,
    /// The output layer.
    Output,
}

impl Part {
    /// Every part, in the order of the work.
    pub const ALL: [Self; 11] = [
        Self::HeadMatmul,
        Self::EarlyMatmul,
        Self::EarlyAttention,
        Self::LateMatmul,
        Self::LateAttention,
        Self::Fill,
        Self::FillScan,
        Self::Scoring,
        Self::SelectedMatmul,
        Self::SelectedAttention,
        Self::Output,
    ];

    /// Returns the word for this part in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::HeadMatmul => "head_matmul",
            Self::EarlyMatmul => "early_matmul",
            Self::EarlyAttention => "early_attention",
            Self::LateMatmul => "late_matmul",
            Self::LateAttention => "late_attention",
            Self::Fill => "fill",
            Self::FillScan => "fill_scan",
            Self::Scoring => "scoring",
            Self::SelectedMatmul => "selected_matmul",
            Self::SelectedAttention => "selected_attention",
            Self::Output => "output",
        }
    }

    pub(super) fn unit(self) -> Unit {
        match self {
            Self::HeadMatmul
            | Self::EarlyMatmul
            | Self::LateMatmul
            | Self::Fill
            | Self::SelectedMatmul
            | Self::Output => Unit::Matmul,
            _ => Unit::Attention,
        }
    }
}

/// Operations and bytes of one part.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
#[allow(missing_docs)]
pub struct Amount {
    pub flops: f64,
    /// Those of `flops` that are attention under an explicit mask.
    pub masked_flops: f64,
    /// Bytes between memory and processor, weights and caches once a call.
    pub bytes: f64,
    /// Those of `bytes` that are weights.
    pub weight_bytes: f64,
}

/// What one prefill costs, part by part.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Cost {
    pub(super) parts: [Amount; Part::ALL.len()],
    /// Layers run, each counted once for each call.
    pub layer_calls: f64,
}

impl Cost {
    /// Returns one part.
    pub fn of(&self, part: Part) -> Amount {
        self.parts[part as usize]
    }

    /// Returns the operations of all parts.
    pub fn flops(&self) -> f64 {
        self.parts.iter().map(|part| part.flops).sum()
    }

    /// Returns the bytes of all parts.
    pub fn bytes(&self) -> f64 {
        self.parts.iter().map(|part| part.bytes).sum()
    }

    pub(super) fn add(&mut self, part: Part, amount: Amount) {
        let sum = &mut self.parts[part as usize];
        sum.flops += amount.flops;
        sum.masked_flops += amount.masked_flops;
        sum.bytes += amount.bytes;
        sum.weight_bytes += amount.weight_bytes;
    }
}
