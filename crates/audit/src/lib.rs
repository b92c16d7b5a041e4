//! What of a code base has to change, or will hurt, on TPUs and through XLA.
//!
//! [`audit`] reads files and gives a [`Report`] of [`Finding`]s; [`fix`] makes the edits that are safe. A [`Rule`] is one
//! declaration: its words, its examples, and where it strikes. The layers, from the lowest: lines of a text, and `python`, a
//! model of names, values and loops over the parser's tree, which knows no rule; `rule` and the families in `rules`; `walk`,
//! which asks the rules of a Python file, and `formats`, which does so for other files; `select`; `one` file's findings; what files
//! know `across` each other, and all in `report`, and what is made of them.
//!
//! This crate does not know devices, PyTorch or a command line: it is a function of files to findings.

mod across;
mod edit;
mod effort;
mod error;
mod files;
mod finding;
mod fixes;
mod formats;
mod one;
mod parallel;
mod python;
mod report;
mod rule;
mod rules;
mod select;
mod show;
mod source;
mod walk;

pub use effort::{Estimate, Part};
pub use error::Error;
pub use finding::Finding;
pub use fixes::{Changed, fix};
pub use one::findings;
pub use report::{Report, audit};
pub use rule::{Effort, Example, Family, Rule, Runs, Severity};
pub use rules::devices::MIRRORED;
pub use rules::{all as rules, by_id, families, family};
pub use select::Settings;
pub use show::{explain, github, page, sarif, table, text};
