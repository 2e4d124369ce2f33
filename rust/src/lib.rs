//! The core of RidgeFill: everything that needs neither a model nor Python.
//!
//! | module | what it holds |
//! |---|---|
//! | [`error`] | one variant per failure; its message names file and tensor |
//! | [`header`] | bytes -> [`header::Header`]: the strict container rules (pure) |
//! | [`mapfile`] | open once, fstat, read or map |
//! | [`writer`] | the atomic write |
//! | [`schema`] | map-file version 1, and the fingerprint: refuse or warn |
//! | [`family`] | what a model's layers are, read from its config.json (pure) |
//! | [`rule`] | the decision rule: which rows of a step are filled (pure) |
//! | [`schedule`] | what each layer does with bulk rows: full, filled, windowed, scanned, skipped (pure) |
//! | [`cost`] | operations, bytes and seconds of an exact and of a filled prefill (pure) |
//! | [`plan`] | request + policy -> plan with its reasons (pure, no clock) |
//! | `python` | the extension module; the only file that names pyo3 (feature `python`) |
//!
//! Imports point one way: python -> {plan -> cost -> {rule, family}, schedule -> family, schema -> mapfile
//! -> header, writer -> header} -> error.

#![deny(missing_docs, unsafe_code)]
#![cfg_attr(not(test), deny(clippy::unwrap_used, clippy::expect_used))]

pub mod cost;
pub mod error;
pub mod family;
pub mod header;
pub mod mapfile;
pub mod plan;
pub mod rule;
pub mod schedule;
pub mod schema;
pub mod writer;

#[cfg(feature = "python")]
mod python;
