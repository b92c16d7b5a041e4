//! Python: what names mean, what values are, and where in a training program a line stands.

mod bind;
mod facts;
mod guard;
mod kind;
mod model;
mod nesting;

pub(crate) use bind::of_kind;
pub(crate) use facts::{Facts, last};
pub(crate) use guard::{assigned_again, is_over_batches};
pub(crate) use kind::{Kind, makes_tensor};
pub(crate) use model::{
    Around, Binding, Call, Compared, Elsewhere, Hit, Model, Scope, Within, bytes, is_false, is_true, text,
};
pub(crate) use nesting::is_shallow;
