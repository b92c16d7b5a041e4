//! The table: all rows, and looking them up by name.

use crate::families::FAMILIES;
use crate::row::Row;
use rustc_hash::FxHashMap;
use std::sync::OnceLock;

/// A row's index. Stable within one build, not across builds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct OpId(pub u16);

struct Table {
    rows: Vec<&'static Row>,
    names: FxHashMap<&'static str, OpId>,
    served: FxHashMap<&'static str, OpId>,
}

fn table() -> &'static Table {
    static TABLE: OnceLock<Table> = OnceLock::new();
    TABLE.get_or_init(|| {
        let rows: Vec<&'static Row> = FAMILIES.iter().flat_map(|f| f.iter()).collect();
        let names = rows.iter().enumerate().map(|(i, r)| (r.name, OpId(i as u16))).collect();
        let served =
            rows.iter().enumerate().flat_map(|(i, r)| r.serves.iter().map(move |s| (*s, OpId(i as u16))));
        let served = served.collect();
        Table { rows, names, served }
    })
}

/// The row of a functional overload: `find("add.Tensor")`.
pub fn find(name: &str) -> Option<OpId> {
    table().names.get(name).copied()
}

/// The row that says [`Row::serves`] of an overload.
pub(crate) fn find_serving(name: &str) -> Option<OpId> {
    table().served.get(name).copied()
}

/// The row of an id.
pub fn row(op: OpId) -> &'static Row {
    table().rows[op.0 as usize]
}

/// Every row with its id.
pub fn rows() -> impl Iterator<Item = (OpId, &'static Row)> {
    table().rows.iter().enumerate().map(|(i, r)| (OpId(i as u16), *r))
}
