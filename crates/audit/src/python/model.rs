//! The semantic model: scopes, what their names stand for, and where the walk is.

use std::ops::Range;

use ruff_python_ast::{CmpOp, Expr, ExprCall, Number, UnaryOp};
use ruff_text_size::{Ranged, TextRange, TextSize};
use rustc_hash::{FxHashMap, FxHashSet};

use super::facts::Facts;
use super::kind::{self, Kind};
use crate::edit::Edit;

/// What a name stands for.
#[derive(Clone, Debug)]
pub(crate) struct Binding {
    pub(crate) kind: Kind,
    /// The qualified name, where it was imported or is another name of such a thing.
    pub(crate) path: Option<String>,
    /// The number that it was given.
    pub(crate) number: Option<i64>,
    /// Whether it was bound once so far.
    pub(crate) once: bool,
    /// Whether it is a test that holds only now and then.
    pub(crate) seldom: bool,
    /// Whether it is computed from a random number of the host.
    pub(crate) random: bool,
    /// How many loops of its function were around when it was first bound.
    pub(crate) loops: usize,
}

/// Names of a module, a class or a function.
#[derive(Default)]
pub(crate) struct Scope<'a> {
    pub(crate) names: FxHashMap<&'a str, Binding>,
    /// What `self.NAME` is, of a class.
    pub(crate) members: FxHashMap<&'a str, Kind>,
    pub(crate) is_class: bool,
}

/// With what an expression is compared.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Compared {
    No,
    /// With something that tells of devices, by its name.
    Device,
    /// With the keys of a table or the members of a set; what is only shown counts, too.
    Key,
    Other,
}

/// What kind of statement asks for the truth of an expression.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Around {
    If,
    While,
    Assert,
}

/// What is around the place of the walk.
pub(crate) enum Within<'a> {
    /// `trains`: a step of the optimizer is in its body, or it goes over batches. `again`: names that its body assigns more
    /// than once.
    Loop {
        trains: bool,
        again: Vec<&'a str>,
    },
    Function {
        forward: bool,
        step: bool,
        item: bool,
        /// Where in the file it begins.
        at: TextSize,
    },
    Class {
        dataset: bool,
        function: bool,
    },
    /// Runs now and then: `if step % 100 == 0`.
    Seldom,
    /// Only one rank comes here.
    OneRank,
    /// Only where values are float16.
    Half,
    /// The body of a lambda, which runs when it is called.
    Lambda,
}

/// The model at a place of the walk.
pub(crate) struct Model<'a> {
    pub(crate) text: &'a str,
    pub(crate) facts: Facts<'a>,
    pub(crate) scopes: Vec<Scope<'a>>,
    pub(crate) within: Vec<Within<'a>>,
    /// Names of modules that were imported anywhere in the file, by their first part.
    pub(crate) torch: bool,
    /// Whether a training loop is in the file.
    pub(crate) trains: bool,
    /// Whether what is walked now goes to a parameter or a name for a device.
    pub(crate) device_slot: bool,
    /// With what it is compared what is walked now.
    pub(crate) compared: Compared,
    /// What asks for the truth that is looked at.
    pub(crate) around: Around,
    /// Whether what is walked now is a test in front of kernels of CUDA.
    pub(crate) for_kernels: bool,
    /// The first parts of the names of all modules that are imported.
    pub(crate) roots: FxHashSet<&'a str>,
    /// Tests in whose branches the walk is.
    pub(crate) tests: Vec<&'a str>,
    /// Names that go over the elements in the comprehensions that are around.
    pub(crate) elements: Vec<&'a str>,
    /// What other files tell.
    pub(crate) elsewhere: Elsewhere<'a>,
}

/// What is known of a file by the others that are read with it.
#[derive(Clone, Copy, Default)]
pub(crate) struct Elsewhere<'a> {
    /// Functions of the file that training loops of others call.
    pub(crate) called: Option<&'a FxHashSet<String>>,
    /// Packages that are among the files, so that to import them brings nothing new.
    pub(crate) own: Option<&'a FxHashSet<String>>,
    /// Whether the file is one of tests, by its name: what it does once is no step.
    pub(crate) is_test: bool,
}

impl Elsewhere<'_> {
    /// Whether a module is of a package that is among the files.
    pub(crate) fn has(&self, module: &str) -> bool {
        let first = module.split('.').next().unwrap_or(module);
        self.own.is_some_and(|own| own.contains(first))
    }
}

/// How deep expressions are looked into to tell what they are.
const FUEL: u32 = 24;

impl<'a> Model<'a> {
    /// The qualified name of an expression, if its first name was imported.
    pub(crate) fn path(&self, expr: &Expr) -> Option<String> {
        let mut parts: Vec<&str> = Vec::new();
        let mut at = expr;
        loop {
            match at {
                Expr::Attribute(attribute) => {
                    parts.push(attribute.attr.as_str());
                    at = &attribute.value;
                }
                Expr::Name(name) => {
                    let binding = self.binding(name.id.as_str())?;
                    let mut path = binding.path.clone()?;
                    for part in parts.iter().rev() {
                        path.push('.');
                        path.push_str(part);
                    }
                    return Some(path);
                }
                _ => return None,
            }
        }
    }

    /// The qualified name of the first name of an expression.
    pub(crate) fn root(&self, expr: &Expr) -> Option<&str> {
        let mut at = expr;
        loop {
            match at {
                Expr::Attribute(attribute) => at = &attribute.value,
                Expr::Name(name) => return self.binding(name.id.as_str())?.path.as_deref(),
                _ => return None,
            }
        }
    }

    pub(crate) fn binding(&self, name: &str) -> Option<&Binding> {
        let inner = self.scopes.len() - 1;
        let visible = |(i, s): &(usize, &Scope<'a>)| *i == inner || !s.is_class;
        self.scopes.iter().enumerate().rev().filter(visible).find_map(|(_, s)| s.names.get(name))
    }

    /// What an expression is.
    pub(crate) fn kind(&self, expr: &Expr) -> Kind {
        self.kind_of(expr, FUEL)
    }

    fn kind_of(&self, expr: &Expr, fuel: u32) -> Kind {
        let Some(fuel) = fuel.checked_sub(1) else { return Kind::Unknown };
        let of = |e: &Expr| self.kind_of(e, fuel);
        match expr {
            Expr::Name(name) => self.binding(name.id.as_str()).map_or(Kind::Unknown, |b| b.kind),
            Expr::Attribute(attribute) => {
                let name = attribute.attr.as_str();
                if let Expr::Name(base) = &*attribute.value
                    && base.id.as_str() == "self"
                {
                    return self.member(name);
                }
                if let Some(path) = self.path(expr) {
                    return if path.starts_with("torch.") { Kind::Host } else { Kind::Unknown };
                }
                match kind::of_attribute(of(&attribute.value), name) {
                    Kind::Unknown
                        if self.torch && matches!(name, "loss" | "logits" | "last_hidden_state") =>
                    {
                        Kind::Maybe
                    }
                    other => other,
                }
            }
            Expr::Call(call) => self.kind_of_call(call, fuel),
            Expr::Compare(compare) => {
                let tests = |op: &CmpOp| matches!(op, CmpOp::Is | CmpOp::IsNot | CmpOp::In | CmpOp::NotIn);
                if compare.ops.iter().any(tests) {
                    return Kind::Host;
                }
                joined(std::iter::once(&*compare.left).chain(&compare.comparators).map(of))
            }
            Expr::BinOp(op) => joined([of(&op.left), of(&op.right)]),
            Expr::UnaryOp(op) if op.op == UnaryOp::Not => Kind::Host,
            Expr::UnaryOp(op) => of(&op.operand),
            Expr::Subscript(of_what) => match of(&of_what.value) {
                Kind::Tensors => Kind::Tensor,
                Kind::Loader => Kind::Maybe,
                known @ (Kind::Tensor | Kind::Maybe | Kind::Numpy | Kind::Host) => known,
                _ => Kind::Unknown,
            },
            Expr::If(either) => {
                let (a, b) = (of(&either.body), of(&either.orelse));
                if a == b { a } else { Kind::Unknown }
            }
            Expr::Named(named) => of(&named.value),
            Expr::StringLiteral(_)
            | Expr::FString(_)
            | Expr::NumberLiteral(_)
            | Expr::BooleanLiteral(_)
            | Expr::NoneLiteral(_) => Kind::Host,
            _ => Kind::Unknown,
        }
    }

    fn kind_of_call(&self, call: &ExprCall, fuel: u32) -> Kind {
        if let Some(path) = self.path(&call.func) {
            // What is made of Python's numbers is on the host, unless a device is named.
            let there = call.arguments.find_keyword("device").is_some();
            let made = matches!(
                path.as_str(),
                "torch.tensor" | "torch.as_tensor" | "torch.from_numpy" | "torch.randperm"
            );
            return if !there && (made || draws_one(&path, call)) {
                Kind::Host
            } else {
                kind::of_call(&path)
            };
        }
        match &*call.func {
            Expr::Name(f) => match self.binding(f.id.as_str()) {
                Some(binding) => called(binding.kind),
                None => kind::of_call(f.id.as_str()),
            },
            Expr::Attribute(f) => match &*f.value {
                Expr::Name(base) if base.id.as_str() == "self" => called(self.member(f.attr.as_str())),
                of => kind::of_method(self.kind_of(of, fuel), f.attr.as_str()),
            },
            other => called(self.kind_of(other, fuel)),
        }
    }

    fn member(&self, name: &str) -> Kind {
        let class = self.scopes.iter().rev().find(|s| s.is_class);
        class.and_then(|c| c.members.get(name)).copied().unwrap_or(Kind::Unknown)
    }

    /// A number that stands there, or that a name was given once.
    pub(crate) fn number(&self, expr: &Expr) -> Option<i64> {
        match expr {
            Expr::NumberLiteral(literal) => match &literal.value {
                Number::Int(n) => n.as_i64(),
                _ => None,
            },
            Expr::Name(name) => self.binding(name.id.as_str()).filter(|b| b.once)?.number,
            _ => None,
        }
    }

    /// Whether the line runs in each step of a training, or for each batch, and not now and then.
    pub(crate) fn in_step(&self) -> bool {
        for around in self.within.iter().rev() {
            match around {
                Within::Seldom | Within::Lambda | Within::Class { .. } => return false,
                Within::Loop { trains: true, .. } => return true,
                Within::Function { forward, step, .. } => return *forward || *step,
                Within::Loop { .. } | Within::OneRank | Within::Half => {}
            }
        }
        false
    }

    /// Whether the innermost loop that is around in its function has a step of the optimizer in it.
    pub(crate) fn in_training_loop(&self) -> bool {
        let inner = self
            .within
            .iter()
            .rev()
            .take_while(|w| !matches!(w, Within::Function { .. } | Within::Class { .. }));
        inner.into_iter().any(|w| matches!(w, Within::Loop { trains: true, .. }))
    }

    /// Whether the line is in a `forward`.
    pub(crate) fn in_forward(&self) -> bool {
        self.function().is_some_and(|f| matches!(f, Within::Function { forward: true, .. }))
    }

    /// Whether the line is in the `__getitem__` or `__iter__` of a dataset, or in a function that makes a batch.
    pub(crate) fn in_dataset(&self) -> bool {
        self.function().is_some_and(|f| matches!(f, Within::Function { item: true, .. }))
    }

    /// Whether the file is one of tests.
    pub(crate) fn is_test(&self) -> bool {
        self.elsewhere.is_test
    }

    /// Whether the line is in a class of datasets, whose values are on the host.
    pub(crate) fn in_dataset_class(&self) -> bool {
        self.within.iter().any(|w| matches!(w, Within::Class { dataset: true, .. }))
    }

    /// Whether the line is in a loop of its function.
    pub(crate) fn in_loop(&self) -> bool {
        let inner = self
            .within
            .iter()
            .rev()
            .take_while(|w| !matches!(w, Within::Function { .. } | Within::Class { .. }));
        inner.into_iter().any(|w| matches!(w, Within::Loop { .. }))
    }

    /// Whether only one rank comes to the line.
    pub(crate) fn on_one_rank(&self) -> bool {
        let inner = self
            .within
            .iter()
            .rev()
            .take_while(|w| !matches!(w, Within::Function { .. } | Within::Class { .. }));
        inner.into_iter().any(|w| matches!(w, Within::OneRank))
    }

    /// Whether the other ranks wait at a barrier of their own somewhere in this function.
    pub(crate) fn others_wait(&self) -> bool {
        self.facts.others_wait.contains(&self.function_at())
    }

    /// Where the function that is around begins.
    fn function_at(&self) -> Option<TextSize> {
        self.within.iter().rev().find_map(|w| match w {
            Within::Function { at, .. } => Some(*at),
            _ => None,
        })
    }

    /// Whether only float16 comes to the line.
    pub(crate) fn for_half(&self) -> bool {
        self.within.iter().any(|w| matches!(w, Within::Half))
    }

    /// Whether the line is within an `autograd.Function`.
    pub(crate) fn in_autograd_function(&self) -> bool {
        self.within.iter().any(|w| matches!(w, Within::Class { function: true, .. }))
    }

    fn function(&self) -> Option<&Within<'a>> {
        self.within.iter().rev().find(|w| matches!(w, Within::Function { .. } | Within::Class { .. }))
    }

    /// Whether the file uses PyTorch.
    pub(crate) fn uses_torch(&self) -> bool {
        self.torch
    }

    /// Whether the expression goes to a parameter or a name for a device.
    pub(crate) fn names_device(&self) -> bool {
        self.device_slot
    }

    /// With what the expression is compared.
    pub(crate) fn compared(&self) -> Compared {
        self.compared
    }

    /// Whether `backward()` is called on a name in this function.
    pub(crate) fn is_loss(&self, name: &str) -> bool {
        self.facts.losses.contains(&(self.function_at(), name))
    }

    /// Whether a training loop is in the file.
    pub(crate) fn trains(&self) -> bool {
        self.trains
    }

    pub(crate) fn source(&self, range: TextRange) -> &'a str {
        &self.text[bytes(range)]
    }

    /// Whether a test has asked for the same before the branch that the walk is in.
    pub(crate) fn was_asked(&self, expr: &impl Ranged) -> bool {
        let source = self.source(expr.range());
        self.tests.iter().any(|t| t.contains(source))
    }

    /// What asks for the truth that is looked at.
    pub(crate) fn statement(&self) -> Around {
        self.around
    }

    /// Whether a package is imported somewhere before.
    pub(crate) fn imports(&self, package: &str) -> bool {
        self.roots.contains(package)
    }

    /// The loops of the function that are around.
    pub(crate) fn loops(&self) -> usize {
        let inner = self
            .within
            .iter()
            .rev()
            .take_while(|w| !matches!(w, Within::Function { .. } | Within::Class { .. }));
        inner.filter(|w| matches!(w, Within::Loop { .. })).count()
    }

    /// Whether the innermost loop around assigns a name more than once.
    pub(crate) fn is_assigned_again(&self, name: &str) -> bool {
        let inner = self.within.iter().rev().find_map(|w| match w {
            Within::Loop { again, .. } => Some(again),
            _ => None,
        });
        inner.is_some_and(|again| again.contains(&name))
    }

    /// Whether a name was bound before the innermost loop around began.
    pub(crate) fn is_older_than_loop(&self, name: &str) -> bool {
        self.binding(name).is_some_and(|b| b.loops < self.loops())
    }
}

/// Whether a call draws a single number, which Python asks for then: `torch.rand(1)`, `torch.randint(0, 5, (1,))`.
fn draws_one(path: &str, call: &ExprCall) -> bool {
    let is_one = |e: &Expr| matches!(e, Expr::NumberLiteral(n) if matches!(&n.value, Number::Int(i) if i.as_i64() == Some(1)));
    let one = |e: &Expr| match e {
        Expr::Tuple(t) => t.elts.iter().all(is_one),
        Expr::List(l) => l.elts.iter().all(is_one),
        other => is_one(other),
    };
    let size = match path {
        "torch.rand" | "torch.randn" if call.arguments.args.len() == 1 => call.arguments.args.first(),
        "torch.randint" => {
            let size = call.arguments.args.last().filter(|e| e.is_tuple_expr() || e.is_list_expr());
            call.arguments.find_keyword("size").map(|k| &k.value).or(size)
        }
        _ => None,
    };
    size.is_some_and(one)
}

/// What comes of a call of a value.
fn called(kind: Kind) -> Kind {
    match kind {
        Kind::Layer => Kind::Tensor,
        Kind::Module => Kind::Maybe,
        _ => Kind::Unknown,
    }
}

/// What an operator makes of values.
fn joined(kinds: impl IntoIterator<Item = Kind>) -> Kind {
    let mut all = None;
    for kind in kinds {
        all = Some(match (all, kind) {
            (None, k) => k,
            (Some(Kind::Tensor), _) | (_, Kind::Tensor) => Kind::Tensor,
            (Some(a), b) if a == b => a,
            (Some(Kind::Maybe), Kind::Host) | (Some(Kind::Host), Kind::Maybe) => Kind::Maybe,
            (Some(Kind::Numpy), Kind::Host) | (Some(Kind::Host), Kind::Numpy) => Kind::Numpy,
            _ => Kind::Unknown,
        });
    }
    all.unwrap_or(Kind::Unknown)
}

/// The bytes of a range.
pub(crate) fn bytes(range: TextRange) -> Range<usize> {
    range.start().to_usize()..range.end().to_usize()
}

/// A place that a rule found.
pub(crate) struct Hit {
    pub(crate) range: TextRange,
    /// What stands for `{}` in the sentence; the source there, if empty.
    pub(crate) what: String,
    pub(crate) edits: Vec<Edit>,
}

impl Hit {
    pub(crate) fn at(node: &impl Ranged) -> Hit {
        Hit { range: node.range(), what: String::new(), edits: Vec::new() }
    }

    pub(crate) fn named(mut self, what: impl Into<String>) -> Hit {
        self.what = what.into();
        self
    }

    /// An edit that mends it.
    pub(crate) fn edit(mut self, range: TextRange, with: impl Into<String>) -> Hit {
        self.edits.push(Edit { range: bytes(range), with: with.into() });
        self
    }
}

/// A call.
pub(crate) struct Call<'m, 'a> {
    pub(crate) call: &'m ExprCall,
    pub(crate) model: &'m Model<'a>,
    /// The qualified name of what is called, if that is known.
    pub(crate) path: &'m str,
}

impl<'m> Call<'m, '_> {
    /// What the method is of.
    pub(crate) fn receiver(&self) -> Option<&'m Expr> {
        match &*self.call.func {
            Expr::Attribute(f) => Some(&f.value),
            _ => None,
        }
    }

    /// What the method is of, if that is a tensor or could be one.
    pub(crate) fn tensor(&self) -> Option<&'m Expr> {
        self.receiver().filter(|r| self.model.kind(r).has_tensor_methods())
    }

    /// What the method is of, unless that is surely no tensor.
    pub(crate) fn perhaps_tensor(&self) -> Option<&'m Expr> {
        let kind = |r: &&Expr| matches!(self.model.kind(r), Kind::Unknown | Kind::Tensor | Kind::Maybe);
        self.receiver().filter(kind).filter(|r| self.model.root(r).is_none())
    }

    /// An argument by its name or position.
    pub(crate) fn argument(&self, name: &str, position: usize) -> Option<&'m Expr> {
        self.call.arguments.find_argument_value(name, position)
    }

    pub(crate) fn keyword(&self, name: &str) -> Option<&'m Expr> {
        self.call.arguments.find_keyword(name).map(|k| &k.value)
    }

    pub(crate) fn first(&self) -> Option<&'m Expr> {
        self.call.arguments.args.first()
    }

    /// Whether `**options` are passed, so that any keyword may be there.
    pub(crate) fn takes_any(&self) -> bool {
        self.call.arguments.keywords.iter().any(|k| k.arg.is_none())
            || self.call.arguments.args.iter().any(|a| matches!(a, Expr::Starred(_)))
    }

    pub(crate) fn hit(&self) -> Option<Hit> {
        let what = self.model.source(self.call.func.range());
        let hit = Hit::at(self.call);
        Some(match &*self.call.func {
            // Of a chain over several lines the method's own line is shown.
            Expr::Attribute(f) if self.model.source(f.value.range()).contains('\n') => {
                let range = TextRange::new(f.attr.start(), self.call.end());
                Hit { range, ..hit }.named(format!(".{}()", f.attr.as_str()))
            }
            _ => hit.named(format!("{what}()")),
        })
    }
}

/// Whether an expression is a literal `True`.
pub(crate) fn is_true(expr: &Expr) -> bool {
    matches!(expr, Expr::BooleanLiteral(b) if b.value)
}

/// Whether an expression is a literal `False`.
pub(crate) fn is_false(expr: &Expr) -> bool {
    matches!(expr, Expr::BooleanLiteral(b) if !b.value)
}

/// A string that stands there.
pub(crate) fn text(expr: &Expr) -> Option<&str> {
    match expr {
        Expr::StringLiteral(s) => Some(s.value.to_str()),
        _ => None,
    }
}
