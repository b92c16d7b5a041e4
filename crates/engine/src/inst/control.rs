//! Control flow: loops and branches, whose bodies are sequences of recorded ops.
//!
//! A body is lowered by the rows of its ops, as a window is, into a region of a `stablehlo.while` or `stablehlo.if`. What
//! it takes from outside are operands of the whole. Its offsets are those of the whole, one after another; what it asserts
//! comes out beside its results.

use super::instances::any_offsets;
use super::{Emitted, Inst};
use crate::error::ErrorKind;
use crate::shared::Shared;
use oxitorch_aten::args::Offset;
use oxitorch_aten::{self as aten};
use oxitorch_hlo::{Builder, DType, TensorType, Value};
use std::cell::RefCell;
use std::hash::{Hash, Hasher};

/// Where an op of a body finds an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Code {
    /// This input of the body.
    Input(u32),
    /// This result of its ops, counted over all.
    Result(u32),
}

/// What an input of a body is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Input {
    /// What the body is given by this number: carried values first, then slices; the operands of a branch.
    Given(u32),
    /// An operand of the whole, the same in each round.
    Operand(u32),
    /// An operand of the whole that is a generator's state, moved on by `after` Philox blocks, and `each` more for each slice
    /// or round before.
    State { operand: u32, after: u64, each: u64 },
}

/// A sequence of ops that is done more or less than once.
#[derive(Clone, Debug)]
pub(crate) struct Body {
    pub(crate) insts: Vec<Shared<Inst>>,
    /// The operands of all, one after another.
    pub(crate) operands: Vec<Code>,
    pub(crate) inputs: Vec<Input>,
    pub(crate) results: Vec<Code>,
}

impl PartialEq for Body {
    fn eq(&self, other: &Body) -> bool {
        self.ids().eq(other.ids())
            && self.operands == other.operands
            && (&self.inputs, &self.results) == (&other.inputs, &other.results)
    }
}

impl Eq for Body {}

impl Hash for Body {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.ids().for_each(|id| id.hash(state));
        (&self.operands, &self.inputs, &self.results).hash(state);
    }
}

/// What control flow does with its bodies.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Flow {
    /// Operand 0 chooses the body, true the first one; they are given the `given` operands after it.
    Branch { bodies: [Body; 2], given: u32 },
    /// While the first body gives true, the second one makes new values of the first `carried` operands.
    While { bodies: [Body; 2], carried: u32 },
    /// `length` rounds of a body, which is given the first `carried` operands and a slice of each of the `sliced` ones after
    /// them; what it gives besides carried values, of the types `stacked`, is stacked. `reverse`: from the last slice to
    /// the first.
    Scan { body: Box<Body>, length: i64, reverse: bool, carried: u32, sliced: u32, stacked: Vec<TensorType> },
}

/// Control flow with the types of its operands, as an instance.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Control {
    /// For messages and for programs.
    pub(crate) name: &'static str,
    pub(crate) flow: Flow,
    pub(crate) operands: Vec<TensorType>,
}

/// What a body is done with.
struct Round<'a> {
    /// Of the whole.
    operands: &'a [Value],
    given: &'a [Value],
    /// The number of the slice or of the round, an integer; none if nothing depends on it.
    number: Option<Value>,
    offsets: &'a [Offset],
}

/// Results, and what is asserted.
type Done = (Vec<Value>, Vec<Value>);

impl Body {
    /// One without ops.
    pub(crate) fn empty() -> Body {
        Body { insts: Vec::new(), operands: Vec::new(), inputs: Vec::new(), results: Vec::new() }
    }

    fn ids(&self) -> impl Iterator<Item = u32> {
        self.insts.iter().map(|inst| inst.id)
    }

    /// What can be wrong with values in it.
    pub(crate) fn checks(&self) -> impl Iterator<Item = &(ErrorKind, String)> {
        self.insts.iter().flat_map(|inst| &inst.checks)
    }

    /// Whether it takes random numbers.
    fn is_random(&self) -> bool {
        self.inputs.iter().any(|input| matches!(input, Input::State { .. }))
    }

    fn emit(&self, b: &Builder, round: &Round<'_>) -> Result<Done, aten::Error> {
        let inputs: Vec<Value> = self.inputs.iter().map(|input| round.input(b, *input)).collect();
        let (mut produced, mut checks) = (Vec::new(), Vec::new());
        let (mut codes, mut offsets) = (self.operands.iter(), round.offsets);
        for inst in &self.insts {
            let operands = codes.by_ref().take(inst.operands.len());
            let operands: Option<Vec<Value>> =
                operands.map(|code| value(&inputs, &produced, *code)).collect();
            let operands = operands.ok_or_else(|| missing(inst.name()))?;
            let (own, rest) = offsets.split_at(inst.offsets);
            offsets = rest;
            let emitted = inst.emit(b, &operands, own)?;
            produced.extend(emitted.outputs);
            checks.extend(emitted.checks);
        }
        let results: Option<Vec<Value>> =
            self.results.iter().map(|code| value(&inputs, &produced, *code)).collect();
        Ok((results.ok_or_else(|| missing("a body"))?, checks))
    }
}

fn missing(name: &str) -> aten::Error {
    aten::Error::Runtime(format!("{name}: an operand has no value"))
}

fn value(inputs: &[Value], produced: &[Option<Value>], code: Code) -> Option<Value> {
    match code {
        Code::Input(i) => Some(inputs[i as usize]),
        Code::Result(i) => produced[i as usize],
    }
}

impl Round<'_> {
    fn input(&self, b: &Builder, input: Input) -> Value {
        match input {
            Input::Given(i) => self.given[i as usize],
            Input::Operand(i) => self.operands[i as usize],
            Input::State { operand, after, each } => {
                let word = |n: u64| b.full(b.scalar_i64(DType::U64, n as i64), &[1]);
                let more = match self.number {
                    Some(number) => {
                        let number = b.broadcast_in_dim(b.convert(number, DType::U64), &[1], &[]);
                        b.add(b.multiply(number, word(each)), word(after))
                    }
                    None => word(after),
                };
                b.add(self.operands[operand as usize], b.concatenate(&[word(0), more], 0))
            }
        }
    }
}

/// The results of a body in a region; of one that fails nothing is used, and the first error is kept.
fn or_kept<T>(kept: &RefCell<Option<aten::Error>>, done: Result<T, aten::Error>, instead: T) -> T {
    done.unwrap_or_else(|e| {
        kept.borrow_mut().get_or_insert(e);
        instead
    })
}

impl Control {
    /// Its bodies.
    pub(crate) fn bodies(&self) -> &[Body] {
        match &self.flow {
            Flow::Branch { bodies, .. } | Flow::While { bodies, .. } => bodies,
            Flow::Scan { body, .. } => std::slice::from_ref(body),
        }
    }

    /// The ops of its bodies, in the order of their offsets.
    pub(crate) fn insts(&self) -> impl Iterator<Item = &Shared<Inst>> {
        self.bodies().iter().flat_map(|body| &body.insts)
    }

    /// Offsets of which nothing is known.
    pub(crate) fn any_offsets(&self, b: &Builder) -> Vec<Offset> {
        self.insts().flat_map(|inst| any_offsets(&inst.kind, b)).collect()
    }

    pub(super) fn emit(
        &self,
        b: &Builder,
        operands: &[Value],
        offsets: &[Offset],
    ) -> Result<Emitted, aten::Error> {
        let kept = RefCell::new(None);
        let (results, checks) = match &self.flow {
            Flow::Branch { bodies, given } => branch(b, bodies, *given as usize, operands, offsets, &kept),
            Flow::While { bodies, carried } => {
                repeat(b, bodies, &operands[..*carried as usize], operands, offsets, &kept)
            }
            Flow::Scan { body, length, reverse, carried, sliced, stacked } => {
                let parts = (*carried as usize, *sliced as usize, stacked.as_slice());
                scan(b, body, (*length, *reverse), parts, operands, offsets, &kept)
            }
        };
        if let Some(e) = kept.into_inner() {
            return Err(e);
        }
        let messages = self.bodies().iter().flat_map(Body::checks).cloned().collect();
        Ok(Emitted { outputs: results.into_iter().map(Some).collect(), checks, rng_blocks: 0, messages })
    }
}

fn holds(b: &Builder) -> Value {
    b.scalar_i64(DType::Pred, 1)
}

fn branch(
    b: &Builder,
    bodies: &[Body; 2],
    given: usize,
    operands: &[Value],
    offsets: &[Offset],
    kept: &RefCell<Option<aten::Error>>,
) -> Done {
    let counts = [0, 1].map(|i: usize| bodies[i].checks().count());
    let offsets = offsets.split_at(bodies[0].insts.iter().map(|inst| inst.offsets).sum());
    // What the other branch asserts holds.
    let one = |own: usize, offsets| {
        let round = Round { operands, given: &operands[1..=given], number: None, offsets };
        let (mut results, checks) = or_kept(kept, bodies[own].emit(b, &round), Done::default());
        for (i, count) in counts.iter().enumerate() {
            if i == own {
                results.extend(&checks);
            } else {
                results.extend((0..*count).map(|_| holds(b)));
            }
        }
        results
    };
    let mut results = b.if_(operands[0], |_| one(0, offsets.0), |_| one(1, offsets.1));
    let checks = results.split_off(results.len().saturating_sub(counts[0] + counts[1]));
    (results, checks)
}

/// Whether what was asserted before holds, and what a round asserts.
fn both(b: &Builder, before: &[Value], now: Vec<Value>) -> Vec<Value> {
    before.iter().zip(now).map(|(&before, now)| b.and(before, now)).collect()
}

fn repeat(
    b: &Builder,
    [condition, body]: &[Body; 2],
    carried: &[Value],
    operands: &[Value],
    offsets: &[Offset],
    kept: &RefCell<Option<aten::Error>>,
) -> Done {
    let offsets = offsets.split_at(condition.insts.iter().map(|inst| inst.offsets).sum());
    let n = carried.len();
    let inits = carried.iter().copied().chain(body.checks().map(|_| holds(b)));
    let counts = body.is_random().then(|| b.scalar_i64(DType::U64, 0));
    let inits: Vec<Value> = inits.chain(counts).collect();
    let checks = n..inits.len() - usize::from(counts.is_some());
    let mut results = b.while_(
        &inits,
        |b, now| {
            let round = Round { operands, given: &now[..n], number: None, offsets: offsets.0 };
            let (results, _) = or_kept(kept, condition.emit(b, &round), (vec![holds(b)], Vec::new()));
            results[0]
        },
        |b, now| {
            let number = counts.map(|_| now[checks.end]);
            let round = Round { operands, given: &now[..n], number, offsets: offsets.1 };
            let same = (now[..n].to_vec(), now[checks.clone()].to_vec());
            let (mut next, asserted) = or_kept(kept, body.emit(b, &round), same);
            next.extend(both(b, &now[checks.clone()], asserted));
            next.extend(number.map(|number| b.add(number, b.scalar_i64(DType::U64, 1))));
            next
        },
    );
    results.truncate(checks.end);
    let checks = results.split_off(n.min(results.len()));
    (results, checks)
}

fn scan(
    b: &Builder,
    body: &Body,
    (length, reverse): (i64, bool),
    (carried, sliced, stacked): (usize, usize, &[TensorType]),
    operands: &[Value],
    offsets: &[Offset],
    kept: &RefCell<Option<aten::Error>>,
) -> Done {
    let number = |n: i64| b.scalar_i64(DType::S32, n);
    let stacks = stacked.iter().map(|ty| {
        let shape: Vec<i64> = std::iter::once(length).chain(ty.shape.iter().copied()).collect();
        b.full(b.scalar_f64(ty.dtype, 0.0), &shape)
    });
    let inits = operands[..carried].iter().copied().chain(stacks);
    let inits: Vec<Value> = inits.chain(body.checks().map(|_| holds(b))).collect();
    let first_check = carried + stacked.len();
    let mut results = b.for_loop(number(0), number(length), &inits, |b, i, now| {
        let at = if reverse { b.subtract(number(length - 1), i) } else { i };
        let start =
            |rank: usize| -> Vec<Value> { std::iter::once(at).chain((1..rank).map(|_| number(0))).collect() };
        let slice = |&x: &Value| {
            let mut sizes = b.shape(x);
            sizes[0] = 1;
            b.reshape(b.dynamic_slice(x, &start(sizes.len()), &sizes), &sizes[1..])
        };
        let mut given = now[..carried].to_vec();
        given.extend(operands[carried..carried + sliced].iter().map(slice));
        let round = Round { operands, given: &given, number: Some(at), offsets };
        let Ok((mut next, checks)) =
            body.emit(b, &round).map_err(|e| kept.borrow_mut().get_or_insert(e).clone())
        else {
            return now.to_vec();
        };
        for (one, &stack) in next[carried..].iter_mut().zip(&now[carried..first_check]) {
            let shape: Vec<i64> = std::iter::once(1).chain(b.shape(*one)).collect();
            *one = b.overwrite(stack, b.reshape(*one, &shape), &start(shape.len()));
        }
        next.extend(both(b, &now[first_check..], checks));
        next
    });
    let checks = results.split_off(first_check.min(results.len()));
    (results, checks)
}
