//! What tests of several crates share: [`fake_plugin`], a PJRT plugin that fails on demand.
//!
//! It is a development dependency only, and knows no crate above `oxitorch-pjrt-sys`.

pub mod fake_plugin;
