use crate::table::Row;

/// The rows of this family.
pub static ROWS: &[Row] = &[];
