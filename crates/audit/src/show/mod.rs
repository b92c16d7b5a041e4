//! Findings and rules for people and programs.

mod explain;
mod github;
mod html;
mod sarif;
mod text;

pub use explain::{explain, page, table};
pub use github::github;
pub use sarif::sarif;
pub use text::text;
