//! What tests of several crates share: [`fake_plugin`], a PJRT plugin that fails on demand; [`multi_process_plugin`], one
//! whose client spans processes, and [`processes`], which starts them; and [`golden`], files that hold inputs and expected
//! outputs.
//!
//! It is a development dependency only, and knows no crate above `oxitorch-pjrt-sys`.

pub mod fake_plugin;
pub mod golden;
pub mod multi_process_plugin;
pub mod processes;
