//! Which row serves an overload: in-place, `out=` and `_foreach_` forms are found from the schema's types and alias marks.

use crate::args::{Arg, ParamKind};
use crate::params::Param;
use crate::row::Row;
use crate::schema::{Argument, Schema};
use crate::table::{OpId, find, find_serving, row, rows};
use rustc_hash::FxHashSet;
use std::sync::OnceLock;

/// Where a row parameter comes from in a call of the bound overload.
#[derive(Clone, Debug, PartialEq)]
pub enum Source {
    /// The argument at this position.
    Arg(usize),
    /// The current element of the list at this position.
    Each(usize),
    /// The current element of the 1-d tensor at this position, as a number.
    EachOfTensor(usize),
    /// A generator: the argument at this position, else the device's default generator.
    Rng(Option<usize>),
    /// What [`Row::counted_by`] or the row of [`Row::sized_by`] gives for the same arguments.
    Size,
    /// Not in the call.
    Fixed(Arg),
}

/// Where the results of a foreach form go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Write {
    /// New tensors.
    New,
    /// The tensors of the list argument at this position.
    Into(usize),
}

/// How the bound overload uses the row's results.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Form {
    /// They are the returns.
    Functional,
    /// The first one overwrites the argument at this position, which is returned.
    InPlace(usize),
    /// They are stored into the arguments at these positions, resized if need be; see also [`Binding::overwritten`].
    Out(Vec<usize>),
    /// The first ones overwrite the arguments at these positions (lists flattened), the others are the returns.
    Mutating(Vec<usize>),
    /// The row runs once for each element of the lists.
    Foreach(Write),
}

/// An overload and the row that serves it.
#[derive(Clone, Debug, PartialEq)]
pub struct Binding {
    /// The row.
    pub op: OpId,
    /// What becomes of the results.
    pub form: Form,
    /// One source for each parameter of the row.
    pub params: Vec<Source>,
}

impl Binding {
    /// The arguments that the row overwrites though no schema says so; its first results are their new values.
    pub fn overwritten(&self) -> impl Iterator<Item = usize> {
        overwritten(row(self.op), &self.params)
    }
}

/// The arguments behind [`Row::writes`].
fn overwritten(row: &Row, params: &[Source]) -> impl Iterator<Item = usize> {
    row.writes.iter().filter_map(|&p| match params.get(p) {
        Some(Source::Arg(i)) => Some(*i),
        _ => None,
    })
}

/// Finds the row for an overload, if there is one whose parameters fit.
pub fn bind(schema: &Schema) -> Option<Binding> {
    let name = schema.name();
    if let Some(op) = find(&name) {
        let params = match_params(schema, row(op), false)?;
        return Some(Binding { op, form: own_form(schema, row(op), &params), params });
    }
    if name == "_foreach_norm.Scalar" {
        return foreach_norm();
    }
    let renamed = find_serving(&name);
    let foreach = schema.base.strip_prefix("_foreach_");
    let outs = schema.outs();
    let mutated = schema.mutated();
    let base = foreach.unwrap_or(&schema.base);
    let in_place = mutated == [0] && base.ends_with('_') && !base.ends_with("__");
    let form = match (foreach, outs.as_slice(), mutated.as_slice()) {
        (Some(_), [], []) => Form::Foreach(Write::New),
        (Some(_), [], [0]) => Form::Foreach(Write::Into(0)),
        (Some(_), [out], []) => Form::Foreach(Write::Into(*out)),
        (None, [_, ..], []) => Form::Out(outs),
        (None, [], [0]) if in_place || renamed.is_some() => Form::InPlace(0),
        _ => return None,
    };
    let base = if in_place { &base[..base.len() - 1] } else { base };
    let (op, params) = match renamed {
        Some(op) => (op, match_params(schema, row(op), foreach.is_some())?),
        None => best(schema, base, foreach.is_some())?,
    };
    Some(Binding { op, form, params })
}

/// The form of an overload that is a row itself.
fn own_form(schema: &Schema, row: &Row, params: &[Source]) -> Form {
    let mut written = schema.mutated();
    written.extend(overwritten(row, params));
    if written.is_empty() { Form::Functional } else { Form::Mutating(written) }
}

/// The row of this base name whose parameters fit, preferring the overload name that this one begins with.
fn best(schema: &Schema, base: &str, foreach: bool) -> Option<(OpId, Vec<Source>)> {
    let mut found: Option<(usize, OpId, Vec<Source>)> = None;
    let plain = |r: &Row| r.composite.is_none() && !r.internal;
    for (op, row) in rows().filter(|(_, r)| r.base() == base && plain(r)) {
        let Some(params) = match_params(schema, row, foreach) else { continue };
        let overload = row.name.split_once('.').map_or("", |(_, o)| o);
        let fixed = params.iter().filter(|p| matches!(p, Source::Fixed(_))).count();
        let rank = 2 * fixed + usize::from(!schema.overload.starts_with(overload));
        if found.as_ref().is_none_or(|(best, ..)| rank < *best) {
            found = Some((rank, op, params));
        }
    }
    found.map(|(_, op, params)| (op, params))
}

/// The arguments that a row sees.
fn visible(schema: &Schema) -> impl Iterator<Item = (usize, &Argument)> {
    schema.args.iter().enumerate().filter(|(_, a)| !a.is_out() && !a.is_placement() && a.ty != "Generator?")
}

/// Matches the arguments of an overload to the parameters of a row, by position and type.
pub fn match_params(schema: &Schema, row: &Row, foreach: bool) -> Option<Vec<Source>> {
    let generator = schema.args.iter().position(|a| a.ty == "Generator?");
    if generator.is_some() && !row.params().iter().any(|p| p.kind == ParamKind::Rng) {
        return None;
    }
    let is_out = schema.args.iter().any(Argument::is_out);
    let mut args = visible(schema);
    let mut sources = Vec::new();
    let is_sized = row.sized_by.is_some() || row.counted_by.is_some();
    let size = row.params().len().checked_sub(1).filter(|_| is_sized);
    for (i, param) in row.params().iter().enumerate() {
        sources.push(match param.kind {
            _ if size == Some(i) => Source::Size,
            ParamKind::Rng => Source::Rng(generator),
            _ => match args.next() {
                Some((i, arg)) => source(i, arg, param, foreach)?,
                // Short foreach forms have no alpha; `out=` brings the dtype that factories take.
                None if foreach && param.kind == ParamKind::Alpha => Source::Fixed(Arg::None),
                None if is_out && (param.accepts)("ScalarType?") => Source::Fixed(Arg::None),
                None => return None,
            },
        });
    }
    args.next().is_none().then_some(sources)
}

fn source(i: usize, arg: &Argument, param: &Param, foreach: bool) -> Option<Source> {
    if !foreach {
        return (param.accepts)(&arg.ty).then_some(Source::Arg(i));
    }
    if let Some(element) = arg.ty.strip_suffix("[]") {
        return (param.accepts)(element).then_some(Source::Each(i));
    }
    if (param.accepts)(&arg.ty) {
        return Some(Source::Arg(i));
    }
    (arg.ty == "Tensor" && (param.accepts)("Scalar")).then_some(Source::EachOfTensor(i))
}

/// `_foreach_norm.Scalar(Tensor[] self, Scalar ord, ScalarType? dtype)` is the vector norm over all dimensions.
fn foreach_norm() -> Option<Binding> {
    let op = find("linalg_vector_norm")?;
    let params = vec![
        Source::Each(0),
        Source::Arg(1),
        Source::Fixed(Arg::None),
        Source::Fixed(Arg::Bool(false)),
        Source::Arg(2),
    ];
    Some(Binding { op, form: Form::Foreach(Write::New), params })
}

/// Whether some overload of this base name may be bound. Never wrong when it says no, and cheaper than [`bind`].
pub fn may_serve(base: &str) -> bool {
    static BASES: OnceLock<FxHashSet<&'static str>> = OnceLock::new();
    let bases = BASES.get_or_init(|| {
        let names = rows().flat_map(|(_, r)| std::iter::once(&r.name).chain(r.serves));
        names.map(|name| name.split_once('.').map_or(*name, |(base, _)| base)).collect()
    });
    let plain = base.strip_prefix("_foreach_").unwrap_or(base);
    base == "_foreach_norm"
        || [base, plain, plain.strip_suffix('_').unwrap_or(plain)].iter().any(|b| bases.contains(b))
}
