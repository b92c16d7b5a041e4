//! Python: what names mean, what values are, and where in a training program a line stands.

mod facts;
mod kind;
mod model;
mod nesting;
mod walk;

pub(crate) use facts::last;
pub(crate) use kind::Kind;
pub(crate) use model::{Around, Call, Hit, Model, is_false, is_true, text};
pub(crate) use walk::audit;
