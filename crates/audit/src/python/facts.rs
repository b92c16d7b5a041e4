//! What is known of a file before it is walked: which loops train, which functions are a step, what is a module.

use ruff_python_ast::visitor::{self, Visitor};
use ruff_python_ast::{CmpOp, Expr, Operator, Stmt, UnaryOp};
use ruff_text_size::{Ranged, TextSize};
use rustc_hash::{FxHashMap, FxHashSet};

/// What a first look at the tree finds.
#[derive(Default)]
pub(crate) struct Facts<'a> {
    /// Loops that a `backward()` or an optimizer's `step()` is directly in, by where they begin.
    pub(crate) training: FxHashSet<TextSize>,
    /// Functions with such a call outside of any loop.
    pub(crate) steps: FxHashSet<TextSize>,
    /// Names on which `backward()` is called, with the functions in which it is, by where they begin; `None` is the module.
    pub(crate) losses: FxHashSet<(Option<TextSize>, &'a str)>,
    /// Classes of this file and the last part of the names of their bases.
    bases: FxHashMap<&'a str, Vec<&'a str>>,
    /// Functions in which ranks other than one wait at a barrier of their own, by where they begin; `None` is the module.
    pub(crate) others_wait: FxHashSet<Option<TextSize>>,
    /// Names that functions of this file are called by within such loops and functions.
    pub(crate) called_in_training: FxHashSet<&'a str>,
    /// The same of functions that are called as `NAME.FUNCTION`, such as those of a module.
    pub(crate) members_called_in_training: FxHashSet<(&'a str, &'a str)>,
}

impl<'a> Facts<'a> {
    pub(crate) fn of(body: &'a [Stmt]) -> Facts<'a> {
        let mut look = Look {
            facts: Facts::default(),
            open: Vec::new(),
            loops: FxHashMap::default(),
            in_loops: FxHashSet::default(),
            seldom: 0,
        };
        look.visit_body(body);
        let Look { mut facts, loops, in_loops, .. } = look;
        for (_, calls) in
            loops.into_iter().filter(|(at, _)| facts.training.contains(at) || in_loops.contains(at))
        {
            for (of, name) in calls {
                match of {
                    Some(of) => facts.members_called_in_training.insert((of, name)),
                    None => facts.called_in_training.insert(name),
                };
            }
        }
        facts
    }

    /// Whether a class of this file descends from a class of such a name.
    pub(crate) fn descends(&self, class: &str, is: fn(&str) -> bool) -> bool {
        let mut seen = FxHashSet::default();
        let mut next = vec![class];
        while let Some(name) = next.pop() {
            let Some(bases) = self.bases.get(name).filter(|_| seen.insert(name)) else { continue };
            if bases.iter().any(|b| is(b)) {
                return true;
            }
            next.extend(bases);
        }
        false
    }
}

/// A loop or function that is open.
enum Open {
    Loop(TextSize),
    Function(TextSize),
}

struct Look<'a> {
    facts: Facts<'a>,
    open: Vec<Open>,
    /// What loops and functions call outside of loops, each with what it is a member of.
    loops: FxHashMap<TextSize, Vec<(Option<&'a str>, &'a str)>>,
    /// Steps that are written in loops, by where they begin.
    in_loops: FxHashSet<TextSize>,
    /// Tests that are open and hold only now and then.
    seldom: u32,
}

impl<'a> Visitor<'a> for Look<'a> {
    fn visit_stmt(&mut self, stmt: &'a Stmt) {
        if let Stmt::If(tested) = stmt
            && (of_other_ranks(&tested.test) && waits(&tested.body)
                || asks_rank(&tested.test) && tested.elif_else_clauses.iter().any(|c| waits(&c.body)))
        {
            self.facts.others_wait.insert(self.function());
        }
        let open = match stmt {
            Stmt::For(_) | Stmt::While(_) => Open::Loop(stmt.start()),
            Stmt::FunctionDef(_) => Open::Function(stmt.start()),
            Stmt::ClassDef(class) => {
                self.facts.bases.insert(&class.name, class.bases().iter().filter_map(last).collect());
                return visitor::walk_stmt(self, stmt);
            }
            Stmt::If(tested) if counts(&tested.test) => {
                self.seldom += 1;
                visitor::walk_stmt(self, stmt);
                self.seldom -= 1;
                return;
            }
            _ => return visitor::walk_stmt(self, stmt),
        };
        self.open.push(open);
        visitor::walk_stmt(self, stmt);
        self.open.pop();
    }

    fn visit_expr(&mut self, expr: &'a Expr) {
        if let Expr::Call(call) = expr {
            match &*call.func {
                Expr::Attribute(f) if f.attr.as_str() == "backward" => {
                    if let Expr::Name(name) = &*f.value {
                        self.facts.losses.insert((self.function(), name.id.as_str()));
                    }
                    self.train();
                }
                Expr::Attribute(f) if f.attr.as_str() == "step" && steps(&f.value) => self.train(),
                Expr::Attribute(f) => {
                    if let Expr::Name(of) = &*f.value {
                        self.called(Some(of.id.as_str()), f.attr.as_str());
                    }
                }
                Expr::Name(f) => self.called(None, f.id.as_str()),
                _ => {}
            }
        }
        visitor::walk_expr(self, expr);
    }
}

impl<'a> Look<'a> {
    fn called(&mut self, of: Option<&'a str>, name: &'a str) {
        if let Some(Open::Loop(at) | Open::Function(at)) = self.open.last().filter(|_| self.seldom == 0) {
            self.loops.entry(*at).or_default().push((of, name));
        }
    }

    fn function(&self) -> Option<TextSize> {
        self.open.iter().rev().find_map(|o| match o {
            Open::Function(at) => Some(*at),
            Open::Loop(_) => None,
        })
    }

    fn train(&mut self) {
        match self.open.last() {
            Some(Open::Loop(at)) => self.facts.training.insert(*at),
            Some(Open::Function(at)) => {
                self.facts.steps.insert(*at);
                // A step that is written in a loop is made in it.
                match self.open.iter().rev().nth(1) {
                    Some(Open::Loop(around)) => {
                        self.in_loops.insert(*at);
                        self.facts.training.insert(*around)
                    }
                    _ => false,
                }
            }
            None => false,
        };
    }
}

/// Whether a test asks for a rank, by the name of what is compared or called.
fn asks_rank(test: &Expr) -> bool {
    match test {
        Expr::Compare(compare) => asks_rank(&compare.left),
        Expr::BoolOp(op) => op.values.iter().any(asks_rank),
        Expr::UnaryOp(op) => asks_rank(&op.operand),
        Expr::Call(call) => asks_rank(&call.func),
        other => last(other).is_some_and(|n| {
            let n = n.to_ascii_lowercase();
            n.contains("rank") || n.contains("main") || n.contains("master")
        }),
    }
}

/// Whether a test holds on all ranks but one: `rank != 0`, `rank > 0`, `rank not in [-1, 0]`, `not is_main`.
fn of_other_ranks(test: &Expr) -> bool {
    let but_one = match test {
        Expr::Compare(compare) => {
            compare.ops.iter().all(|op| matches!(op, CmpOp::NotEq | CmpOp::Gt | CmpOp::NotIn))
        }
        Expr::UnaryOp(op) => op.op == UnaryOp::Not,
        Expr::BoolOp(op) => return op.values.iter().any(of_other_ranks),
        _ => false,
    };
    but_one && asks_rank(test)
}

/// Whether a barrier is among some statements.
fn waits(body: &[Stmt]) -> bool {
    body.iter().any(|s| match s {
        Stmt::Expr(e) => {
            matches!(&*e.value, Expr::Call(c) if last(&c.func).is_some_and(|n| n.contains("barrier")))
        }
        _ => false,
    })
}

/// Whether a value that has `step()` is an optimizer or its scaler, by its name.
fn steps(value: &Expr) -> bool {
    last(value).is_some_and(|name| {
        let name = name.to_ascii_lowercase();
        name.contains("opt") || name.contains("scaler") || name == "engine" || name == "model_engine"
    })
}

/// Whether a test asks for a remainder, as `step % 100 == 0` does.
pub(crate) fn counts(test: &Expr) -> bool {
    match test {
        Expr::BoolOp(op) => op.values.iter().any(counts),
        Expr::Compare(compare) => counts(&compare.left),
        Expr::UnaryOp(op) => counts(&op.operand),
        Expr::BinOp(op) => op.op == Operator::Mod,
        _ => false,
    }
}

/// The last part of a name.
pub(crate) fn last(expr: &Expr) -> Option<&str> {
    match expr {
        Expr::Name(name) => Some(name.id.as_str()),
        Expr::Attribute(attribute) => Some(attribute.attr.as_str()),
        Expr::Subscript(of) => last(&of.value),
        _ => None,
    }
}
