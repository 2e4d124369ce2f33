//! The extension module `ridgefill._core`; its types are in ridgefill/_core.pyi.
//!
//! Long work runs with the GIL released, and a panic in it becomes a `RidgeFillError`: nothing unwinds into Python.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;

use numpy::ndarray::ArrayView1;
use numpy::{PyArray1, PyArrayMethods, PyReadonlyArray1, PyReadonlyArrayDyn};
use pyo3::exceptions::{PyMemoryError, PyOSError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::cost::{self, Fill, Question, Rates, Shape};
use crate::error::{Class, Error, Fault, Result};
use crate::family::Model;
use crate::header::Dtype;
use crate::plan::{self, Policy, Request, Trace};
use crate::rule::{self, Step};
use crate::schedule::LayerSchedule;
use crate::writer::TensorData;
use crate::{mapfile, schema, writer};

/// Runs `work` with the GIL released; failures become the exceptions of ridgefill/errors.py.
fn run<T: Send>(py: Python<'_>, work: impl FnOnce() -> Result<T> + Send) -> PyResult<T> {
    match py.detach(|| catch_unwind(AssertUnwindSafe(work))) {
        Ok(result) => result.map_err(|error| to_exception(py, &error)),
        Err(_) => {
            let class = py.import("ridgefill.errors")?.getattr("RidgeFillError")?;
            let message = "internal error: the core panicked (its message is on stderr); please report it";
            Err(PyErr::from_value(class.call1((message,))?))
        }
    }
}

fn to_exception(py: Python<'_>, error: &Error) -> PyErr {
    match &error.fault {
        Fault::Io(io) if io.kind() == std::io::ErrorKind::OutOfMemory => {
            return PyMemoryError::new_err(error.to_string());
        }
        Fault::Io(io) => {
            // With these three arguments OSError picks its own subclass (FileNotFoundError, ...) and names the file.
            return match io.raw_os_error() {
                Some(errno) => PyOSError::new_err((errno, io.to_string(), error.path.clone())),
                None => PyOSError::new_err(error.to_string()),
            };
        }
        _ => {}
    }
    build_exception(py, error).unwrap_or_else(|failed| failed)
}

fn build_exception(py: Python<'_>, error: &Error) -> PyResult<PyErr> {
    let (name, located) = match error.fault.class() {
        Class::Format => ("MapFormatError", true),
        Class::Schema => ("MapSchemaError", true),
        Class::Mismatch => ("MapMismatchError", true),
        Class::Plan => ("PlanError", false),
        Class::Schedule | Class::Io => ("ScheduleError", false),
    };
    let fields = PyDict::new(py);
    if located {
        fields.set_item("path", error.path.as_ref().map(|path| path.to_string_lossy()))?;
        fields.set_item("tensor", &error.tensor)?;
        fields.set_item("kind", error.kind())?;
    }
    let class = py.import("ridgefill.errors")?.getattr(name)?;
    Ok(PyErr::from_value(class.call((error.to_string(),), Some(&fields))?))
}

/// One tensor of a file.
#[pyclass(frozen, get_all, module = "ridgefill._core")]
struct TensorInfo {
    name: String,
    dtype: &'static str,
    shape: Py<pyo3::types::PyTuple>,
    start: u64,
    end: u64,
}

#[pymethods]
impl TensorInfo {
    fn __repr__(&self, py: Python<'_>) -> String {
        let shape = self.shape.bind(py);
        format!(
            "TensorInfo(name={:?}, dtype={:?}, shape={shape}, start={}, end={})",
            self.name, self.dtype, self.start, self.end
        )
    }
}

/// An open, checked safetensors file.
#[pyclass(frozen, module = "ridgefill._core")]
struct MapFile {
    inner: mapfile::MapFile,
}

#[pymethods]
impl MapFile {
    /// Opens a file and checks everything but the data's values.
    #[staticmethod]
    #[pyo3(signature = (path, *, mmap = false))]
    fn open(py: Python<'_>, path: PathBuf, mmap: bool) -> PyResult<Self> {
        run(py, || mapfile::MapFile::open(&path, mmap)).map(|inner| Self { inner })
    }

    #[getter]
    fn path(&self) -> String {
        self.inner.path().to_string_lossy().into_owned()
    }

    #[getter]
    fn metadata(&self) -> BTreeMap<String, String> {
        self.inner.header().metadata.clone()
    }

    #[getter]
    fn tensors(&self, py: Python<'_>) -> PyResult<Vec<TensorInfo>> {
        self.inner
            .header()
            .tensors
            .iter()
            .map(|tensor| {
                Ok(TensorInfo {
                    name: tensor.name.clone(),
                    dtype: tensor.dtype.name(),
                    shape: pyo3::types::PyTuple::new(py, &tensor.shape)?.unbind(),
                    start: tensor.start,
                    end: tensor.end,
                })
            })
            .collect()
    }

    #[getter]
    fn data_bytes(&self) -> u64 {
        self.inner.data_bytes()
    }

    /// Returns the content of a map file of version 1 as one JSON document.
    fn schema(&self, py: Python<'_>) -> PyResult<String> {
        run(py, || {
            schema::validate(self.inner.header())
                .and_then(|schema| schema.to_json())
                .map_err(|error| error.in_file(self.inner.path()))
        })
    }

    /// Returns the data section; non-finite values are refused.
    fn read<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyArray1<u8>>> {
        let (py, file) = (slf.py(), &slf.get().inner);
        if file.mapped().is_none() {
            return Ok(PyArray1::from_vec(py, run(py, || file.read())?));
        }
        run(py, || file.check_mapped())?;
        Ok(borrow_mapped(slf))
    }

    fn __repr__(&self) -> String {
        let (path, tensors) = (self.inner.path().display(), self.inner.header().tensors.len());
        format!("MapFile({path}: {tensors} tensors, {} data bytes)", self.inner.data_bytes())
    }
}

/// Returns a read-only array over a mapped file's data, which keeps the map alive.
#[allow(unsafe_code)]
fn borrow_mapped<'py>(slf: &Bound<'py, MapFile>) -> Bound<'py, PyArray1<u8>> {
    let view = ArrayView1::from(slf.get().inner.mapped().unwrap_or_default());
    // SAFETY: the view's memory belongs to the map inside `slf`, which is frozen and which the array owns a
    // reference to, so it neither moves nor goes before the array does; and the array is made read-only at once.
    let array = unsafe { PyArray1::borrow_from_array(&view, slf.clone().into_any()) };
    array.readwrite().make_nonwriteable();
    array
}

/// Writes a safetensors file atomically.
#[pyfunction]
fn write_map_file(
    py: Python<'_>,
    path: PathBuf,
    tensors: Vec<(String, String, Vec<u64>, PyReadonlyArrayDyn<'_, u8>)>,
    metadata: BTreeMap<String, String>,
) -> PyResult<()> {
    let mut list = Vec::with_capacity(tensors.len());
    for (name, dtype, shape, array) in &tensors {
        let refuse = |fault: Fault| {
            let error = Error::from(fault).in_tensor(name).in_file(&path);
            to_exception(py, &Error { writing: true, ..error })
        };
        let dtype = Dtype::parse(dtype).ok_or_else(|| refuse(Fault::UnknownDtype { found: dtype.clone() }))?;
        let bytes = array.as_slice().map_err(|_| {
            PyValueError::new_err(format!(
                "tensor {name:?}: its bytes are not contiguous; pass numpy.ascontiguousarray(...)"
            ))
        })?;
        list.push(TensorData { name: name.clone(), dtype, shape: shape.clone(), bytes });
    }
    run(py, || writer::write_map_file(&path, &list, &metadata))
}

/// Compares a file's fingerprint with a model's: returns warnings, raises MapMismatchError.
#[pyfunction]
fn compare_fingerprints(py: Python<'_>, file_json: &str, model_json: &str) -> PyResult<Vec<(&'static str, String)>> {
    let warnings = run(py, || schema::compare_fingerprints(file_json, model_json))?;
    Ok(warnings.into_iter().map(|warning| (warning.kind, warning.message)).collect())
}

/// The spans of one step.
#[pyclass(frozen, get_all, module = "ridgefill._core")]
struct Decision {
    fill_start: u64,
    fill_end: u64,
    step_end: u64,
    rows_filled: u64,
    reason: String,
}

#[pymethods]
impl Decision {
    fn __repr__(&self) -> String {
        let Self { fill_start, fill_end, step_end, rows_filled, reason } = self;
        format!(
            "Decision(fill_start={fill_start}, fill_end={fill_end}, step_end={step_end}, rows_filled={rows_filled}, reason={reason:?})"
        )
    }
}

/// Returns a count that Python gave, refusing negative ones by name.
fn count(py: Python<'_>, name: &str, value: i64) -> PyResult<u64> {
    u64::try_from(value).map_err(|_| {
        to_exception(py, &Fault::Schedule { what: format!("{name} is {value}; expected 0 or more") }.into())
    })
}

/// Returns which rows of one step are filled.
#[pyfunction]
#[pyo3(signature = (*, cached_tokens, step_tokens, n_ahead = 0, tail, head, min_bulk, tile = 1, logits_to_keep = 1))]
#[allow(clippy::too_many_arguments)] // the rule's inputs, by keyword
fn decide(
    py: Python<'_>,
    cached_tokens: i64,
    step_tokens: i64,
    n_ahead: i64,
    tail: i64,
    head: i64,
    min_bulk: i64,
    tile: i64,
    logits_to_keep: i64,
) -> PyResult<Decision> {
    let step = Step {
        cached_tokens: count(py, "cached_tokens", cached_tokens)?,
        step_tokens: count(py, "step_tokens", step_tokens)?,
        n_ahead: count(py, "n_ahead", n_ahead)?,
        tail: count(py, "tail", tail)?,
        head: count(py, "head", head)?,
        min_bulk: count(py, "min_bulk", min_bulk)?,
        tile: count(py, "tile", tile)?,
        logits_to_keep: count(py, "logits_to_keep", logits_to_keep)?,
    };
    // Not through `run`: this call is on the path of every forward, and releasing the GIL costs more than the rule.
    let decision = rule::decide(&step).map_err(|error| to_exception(py, &error))?;
    Ok(Decision {
        fill_start: decision.fill_start,
        fill_end: decision.fill_end,
        step_end: decision.step_end,
        rows_filled: decision.rows_filled(),
        reason: decision.reason.to_string(),
    })
}

/// Returns the first bulk row that a layer with this window must fill.
#[pyfunction]
#[pyo3(signature = (fill_start, fill_end, window))]
fn first_needed_row(py: Python<'_>, fill_start: i64, fill_end: i64, window: Option<i64>) -> PyResult<u64> {
    let window = window.map(|window| count(py, "window", window)).transpose()?;
    Ok(rule::first_needed_row(count(py, "fill_start", fill_start)?, count(py, "fill_end", fill_end)?, window))
}

/// Operations of one prefill step, exact and filled.
#[pyclass(frozen, get_all, module = "ridgefill._core")]
struct PrefillCost {
    exact_flops: f64,
    filled_flops: f64,
    fill_flops: f64,
    ratio: f64,
    rows_filled: u64,
}

#[pymethods]
impl PrefillCost {
    fn __repr__(&self) -> String {
        let Self { exact_flops, filled_flops, fill_flops, ratio, rows_filled } = self;
        format!(
            "PrefillCost(exact_flops={exact_flops:.4e}, filled_flops={filled_flops:.4e}, fill_flops={fill_flops:.4e}, ratio={ratio:.4}, rows_filled={rows_filled})"
        )
    }
}

/// Returns the operations of a prefill, exact and filled.
#[pyfunction]
#[pyo3(signature = (
    shape_json, *, prompt_tokens, cached_tokens = 0, split, tail, head, min_bulk = 256, logits_to_keep = 1, features = 1,
    fused_rank = None
))]
#[allow(clippy::too_many_arguments)]
fn prefill_cost(
    py: Python<'_>,
    shape_json: &str,
    prompt_tokens: i64,
    cached_tokens: i64,
    split: i64,
    tail: i64,
    head: i64,
    min_bulk: i64,
    logits_to_keep: i64,
    features: i64,
    fused_rank: Option<i64>,
) -> PyResult<PrefillCost> {
    let cached = count(py, "cached_tokens", cached_tokens)?;
    let step = Step {
        cached_tokens: cached,
        step_tokens: count(py, "prompt_tokens - cached_tokens", prompt_tokens.saturating_sub(cached_tokens))?,
        n_ahead: 0,
        tail: count(py, "tail", tail)?,
        head: count(py, "head", head)?,
        min_bulk: count(py, "min_bulk", min_bulk)?,
        tile: 1,
        logits_to_keep: count(py, "logits_to_keep", logits_to_keep)?,
    };
    let fill = Fill {
        split: count(py, "split", split)? as usize,
        features: count(py, "features", features)?,
        fused_rank: fused_rank.map(|rank| count(py, "fused_rank", rank)).transpose()?,
    };
    let cost = run(py, || cost::prefill_cost(&Shape::from_json(shape_json)?, &step, &fill))?;
    Ok(PrefillCost {
        exact_flops: cost.exact_flops,
        filled_flops: cost.filled_flops,
        fill_flops: cost.fill_flops,
        ratio: cost.ratio(),
        rows_filled: cost.decision.rows_filled(),
    })
}

fn to_json(value: &impl serde::Serialize) -> Result<String> {
    serde_json::to_string(value)
        .map_err(|error| Fault::Plan { what: format!("cannot be written as JSON: {error}") }.into())
}

/// Returns the decoder that a config.json describes, as JSON.
#[pyfunction]
fn describe_model(py: Python<'_>, config_json: &str) -> PyResult<String> {
    run(py, || Model::from_config(config_json)?.to_json())
}

/// Returns the model types that `describe_model` reads.
#[pyfunction]
fn known_model_types() -> Vec<&'static str> {
    Model::known_types()
}

/// Returns the parameters, weights and cache shapes of a described model, as JSON.
#[pyfunction]
#[pyo3(signature = (model_json, *, rows = 1))]
fn model_figures(py: Python<'_>, model_json: &str, rows: i64) -> PyResult<String> {
    let rows = count(py, "rows", rows)?;
    run(py, || to_json(&Model::from_description(model_json)?.figures(rows)))
}

/// Returns the schedule of a fill as JSON.
#[pyfunction]
#[pyo3(signature = (model_json, *, split, tail = 512, head = 4, tile = 1, chunk_tokens = None))]
fn layer_schedule(
    py: Python<'_>,
    model_json: &str,
    split: i64,
    tail: i64,
    head: i64,
    tile: i64,
    chunk_tokens: Option<i64>,
) -> PyResult<String> {
    let split = count(py, "split", split)? as usize;
    let (tail, head, tile) = (count(py, "tail", tail)?, count(py, "head", head)?, count(py, "tile", tile)?);
    let chunk_tokens = chunk_tokens.map(|tokens| count(py, "chunk_tokens", tokens)).transpose()?;
    run(py, || {
        let model = Model::from_description(model_json)?;
        LayerSchedule::new(&model, split, tail, head, tile, chunk_tokens)?.to_json()
    })
}

/// Returns a schedule as JSON again, checked against its model.
#[pyfunction]
fn check_schedule(py: Python<'_>, model_json: &str, schedule_json: &str) -> PyResult<String> {
    run(py, || LayerSchedule::from_json(schedule_json, &Model::from_description(model_json)?)?.to_json())
}

/// Returns a data sheet's rates as JSON.
#[pyfunction]
fn device_rates(py: Python<'_>, name: &str) -> PyResult<String> {
    run(py, || to_json(&Rates::of_device(name)?))
}

/// Returns rates as JSON again, checked.
#[pyfunction]
fn check_rates(py: Python<'_>, rates_json: &str) -> PyResult<String> {
    run(py, || to_json(&Rates::from_json(rates_json)?))
}

/// Returns what a prefill is predicted to cost, as JSON.
#[pyfunction]
fn predict(py: Python<'_>, model_json: &str, question_json: &str) -> PyResult<String> {
    run(py, || {
        let shape = Shape::of_model(&Model::from_description(model_json)?);
        to_json(&Question::from_json(question_json)?.report(&shape)?)
    })
}

/// Returns what each split would give, as JSON.
#[pyfunction]
#[pyo3(signature = (model_json, question_json, *, losses = Vec::new(), max_loss = None))]
fn search(
    py: Python<'_>,
    model_json: &str,
    question_json: &str,
    losses: Vec<(usize, f64)>,
    max_loss: Option<f64>,
) -> PyResult<String> {
    run(py, || {
        let shape = Shape::of_model(&Model::from_description(model_json)?);
        let asked = Question::from_json(question_json)?;
        let rates = asked.rates.as_ref();
        to_json(&plan::search(&shape, &asked.setting(), &asked.step(), rates, &losses, max_loss)?)
    })
}

type Choices<'py> = (Bound<'py, PyArray1<i32>>, Bound<'py, PyArray1<f64>>, Bound<'py, PyArray1<f64>>);

/// A model and a policy, made ready.
#[pyclass(frozen, module = "ridgefill._core")]
struct Planner {
    inner: plan::Planner,
}

#[pymethods]
impl Planner {
    #[new]
    fn new(py: Python<'_>, model_json: &str, policy_json: &str) -> PyResult<Self> {
        run(py, || {
            let shape = Shape::of_model(&Model::from_description(model_json)?);
            plan::Planner::new(&shape, Policy::from_json(policy_json)?)
        })
        .map(|inner| Self { inner })
    }

    /// The same for a shape, as `prefill_cost` takes it.
    #[staticmethod]
    fn from_shape(py: Python<'_>, shape_json: &str, policy_json: &str) -> PyResult<Self> {
        run(py, || plan::Planner::new(&Shape::from_json(shape_json)?, Policy::from_json(policy_json)?))
            .map(|inner| Self { inner })
    }

    /// (tier, split, tail, loss) of each candidate; `exact` first.
    #[getter]
    fn candidates(&self) -> Vec<(String, Option<usize>, u64, Option<f64>)> {
        let candidates = self.inner.candidates().iter();
        candidates.map(|one| (one.tier.to_string(), one.split, one.tail, one.loss_nats)).collect()
    }

    /// Returns the plan for one request as JSON.
    fn plan(&self, py: Python<'_>, request_json: &str) -> PyResult<String> {
        run(py, || to_json(&self.inner.plan(&Request::from_json(request_json)?)?))
    }

    /// Returns (candidate, TTFT, exact TTFT) for each request of a trace.
    #[pyo3(signature = (prompt_tokens, *, cached_tokens = None, output_tokens = None, sensitivity = None, ttft_target_s = None))]
    fn plan_trace<'py>(
        &self,
        py: Python<'py>,
        prompt_tokens: PyReadonlyArray1<'py, i64>,
        cached_tokens: Option<PyReadonlyArray1<'py, i64>>,
        output_tokens: Option<PyReadonlyArray1<'py, i64>>,
        sensitivity: Option<PyReadonlyArray1<'py, u8>>,
        ttft_target_s: Option<PyReadonlyArray1<'py, f64>>,
    ) -> PyResult<Choices<'py>> {
        let trace = Trace {
            prompt_tokens: slice("prompt_tokens", &prompt_tokens)?,
            cached_tokens: cached_tokens.as_ref().map(|array| slice("cached_tokens", array)).transpose()?,
            output_tokens: output_tokens.as_ref().map(|array| slice("output_tokens", array)).transpose()?,
            sensitivity: sensitivity.as_ref().map(|array| slice("sensitivity", array)).transpose()?,
            ttft_target_s: ttft_target_s.as_ref().map(|array| slice("ttft_target_s", array)).transpose()?,
        };
        let choices = run(py, || self.inner.choose_all(&trace))?;
        Ok((
            PyArray1::from_vec(py, choices.candidate),
            PyArray1::from_vec(py, choices.ttft_s),
            PyArray1::from_vec(py, choices.exact_ttft_s),
        ))
    }

    fn __repr__(&self) -> String {
        format!("Planner({} candidates)", self.inner.candidates().len())
    }
}

/// Returns an array's elements where they lie.
fn slice<'a, T: numpy::Element>(name: &str, array: &'a PyReadonlyArray1<'_, T>) -> PyResult<&'a [T]> {
    array
        .as_slice()
        .map_err(|_| PyValueError::new_err(format!("{name} is not contiguous; pass numpy.ascontiguousarray(...)")))
}

/// The device sources: a wheel must not install a folder `cuda`, which is NVIDIA's, so they travel in here.
const DEVICE_SOURCES: [(&str, &str); 4] = [
    ("common.cuh", include_str!("../../cuda/common.cuh")),
    ("gram.cu", include_str!("../../cuda/gram.cu")),
    ("ridge_solve.cu", include_str!("../../cuda/ridge_solve.cu")),
    ("synth_kv.cu", include_str!("../../cuda/synth_kv.cu")),
];

/// Returns the device sources by file name.
#[pyfunction]
fn device_sources() -> BTreeMap<&'static str, &'static str> {
    BTreeMap::from(DEVICE_SOURCES)
}

/// The compiled core of RidgeFill.
#[pymodule]
mod _core {
    use pyo3::prelude::*;

    #[pymodule_export]
    use super::{
        Decision, MapFile, Planner, PrefillCost, TensorInfo, check_rates, check_schedule, compare_fingerprints, decide,
        describe_model, device_rates, device_sources, first_needed_row, known_model_types, layer_schedule,
        model_figures, predict, prefill_cost, search, write_map_file,
    };

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
