//! What statements bind names to.

use ruff_python_ast::visitor::{self, Visitor};
use ruff_python_ast::{Expr, Number, Stmt};

use super::facts::{counts, last};
use super::guard::is_loader;
use super::kind::Kind;
use super::model::{Binding, Model};

/// Functions that give random numbers on the host.
const RANDOM: &[&str] = &["random.", "numpy.random."];

/// A binding of which only the kind is known.
pub(crate) fn of_kind(kind: Kind) -> Binding {
    Binding { kind, path: None, number: None, once: true, seldom: false, random: false, loops: 0 }
}

impl<'a> Model<'a> {
    pub(crate) fn bind(&mut self, name: &'a str, mut binding: Binding) {
        binding.loops = self.loops();
        if let Some(scope) = self.scopes.last_mut() {
            if let Some(before) = scope.names.get(name) {
                binding.once = false;
                binding.loops = binding.loops.min(before.loops);
            }
            scope.names.insert(name, binding);
        }
    }

    /// Binds what an import makes, without asking rules.
    pub(crate) fn bind_imports(&mut self, stmt: &'a Stmt) {
        match stmt {
            Stmt::Import(import) => {
                for alias in &import.names {
                    let whole = alias.name.as_str();
                    let first = whole.split('.').next().unwrap_or(whole);
                    self.torch |= first == "torch";
                    self.roots.insert(first);
                    let (name, path) = alias.asname.as_ref().map_or((first, first), |a| (a.as_str(), whole));
                    self.bind(name, Binding { path: Some(path.to_owned()), ..of_kind(Kind::Named) });
                }
            }
            Stmt::ImportFrom(import) => {
                let module = import.module.as_ref().map_or("", |m| m.as_str());
                self.roots.insert(module.split('.').next().unwrap_or(module));
                self.torch |= module == "torch" || module.starts_with("torch.");
                for alias in &import.names {
                    let name = alias.asname.as_ref().unwrap_or(&alias.name).as_str();
                    let path = match import.level {
                        0 => format!("{module}.{}", alias.name.as_str()),
                        _ => format!(".{module}.{}", alias.name.as_str()),
                    };
                    self.bind(name, Binding { path: Some(path), ..of_kind(Kind::Named) });
                }
            }
            Stmt::Try(tried) => tried.body.iter().for_each(|s| self.bind_imports(s)),
            Stmt::If(tested) => tested.body.iter().for_each(|s| self.bind_imports(s)),
            _ => {}
        }
    }

    /// Binds the names of a target to a value.
    pub(crate) fn assign(&mut self, target: &'a Expr, value: Option<&'a Expr>, kind: Kind) {
        match target {
            Expr::Name(name) => {
                let name = name.id.as_str();
                let kind = match kind {
                    Kind::Unknown | Kind::Maybe if self.is_loss(name) => Kind::Tensor,
                    kind => kind,
                };
                let path = value.and_then(|v| match v {
                    Expr::Name(_) | Expr::Attribute(_) => self.path(v),
                    _ => None,
                });
                let number = value.and_then(|v| match v {
                    Expr::NumberLiteral(n) => match &n.value {
                        Number::Int(n) => n.as_i64(),
                        _ => None,
                    },
                    _ => None,
                });
                let seldom = value.is_some_and(counts);
                let random = value.is_some_and(|v| self.is_random(v));
                self.bind(name, Binding { path, number, seldom, random, ..of_kind(kind) });
            }
            Expr::Attribute(attribute) => {
                if let Expr::Name(base) = &*attribute.value
                    && base.id.as_str() == "self"
                    && let Some(class) = self.scopes.iter_mut().rev().find(|s| s.is_class)
                {
                    let name = attribute.attr.as_str();
                    // What is one thing here and another there is neither.
                    let kind = match class.members.get(name) {
                        Some(before) if *before != kind => Kind::Unknown,
                        _ => kind,
                    };
                    class.members.insert(name, kind);
                }
            }
            Expr::Tuple(tuple) => self.unpack(&tuple.elts, value, kind),
            Expr::List(list) => self.unpack(&list.elts, value, kind),
            Expr::Starred(starred) => self.assign(&starred.value, None, Kind::Unknown),
            _ => {}
        }
    }

    fn unpack(&mut self, targets: &'a [Expr], value: Option<&'a Expr>, kind: Kind) {
        let values: &[Expr] = match value {
            Some(Expr::Tuple(t)) if t.elts.len() == targets.len() => &t.elts,
            _ => &[],
        };
        let part = match kind {
            Kind::Tensor | Kind::Tensors => Kind::Tensor,
            Kind::Maybe => Kind::Maybe,
            _ => Kind::Unknown,
        };
        for (i, target) in targets.iter().enumerate() {
            match values.get(i) {
                Some(v) => {
                    let kind = self.kind(v);
                    self.assign(target, Some(v), kind);
                }
                None => self.assign(target, None, part),
            }
        }
    }

    /// What a loop's variable is.
    pub(crate) fn assign_each(&mut self, target: &'a Expr, iter: &'a Expr) {
        let wrapped = |e: &'a Expr| match e {
            Expr::Call(call) => {
                let name = last(&call.func)?;
                matches!(name, "enumerate" | "tqdm" | "trange" | "prefetch" | "track" | "islice" | "iter")
                    .then_some((name, call.arguments.args.first()?))
            }
            _ => None,
        };
        let (mut iter, mut numbered) = (iter, false);
        while let Some((name, inner)) = wrapped(iter) {
            numbered |= name == "enumerate";
            iter = inner;
        }
        let kind = match self.kind(iter) {
            Kind::Loader => Kind::Maybe,
            Kind::Unknown if is_loader(iter) => Kind::Maybe,
            Kind::Tensor | Kind::Tensors => Kind::Tensor,
            Kind::Host => Kind::Host,
            _ => Kind::Unknown,
        };
        match target {
            Expr::Tuple(tuple) if numbered && tuple.elts.len() == 2 => {
                self.assign(&tuple.elts[0], None, Kind::Host);
                self.assign(&tuple.elts[1], None, kind);
            }
            _ => self.assign(target, None, kind),
        }
    }

    /// Whether a value is computed from a random number of the host; of a tensor of them only its shape would matter.
    pub(crate) fn is_random(&self, expr: &Expr) -> bool {
        struct Look<'m, 'a> {
            model: &'m Model<'a>,
            found: bool,
        }
        impl<'e> Visitor<'e> for Look<'_, '_> {
            fn visit_expr(&mut self, expr: &'e Expr) {
                match expr {
                    Expr::Name(name) => {
                        self.found |= self.model.binding(name.id.as_str()).is_some_and(|b| b.random);
                    }
                    Expr::Attribute(a) if matches!(a.attr.as_str(), "shape" | "size" | "ndim") => {}
                    Expr::Call(call) => {
                        let path = self.model.path(&call.func).unwrap_or_default();
                        self.found |= RANDOM.iter().any(|r| path.starts_with(r));
                        visitor::walk_expr(self, expr);
                    }
                    _ => visitor::walk_expr(self, expr),
                }
            }
        }
        if !(self.roots.contains("random") || self.roots.contains("numpy")) {
            return false;
        }
        let mut look = Look { model: self, found: false };
        look.visit_expr(expr);
        look.found
    }

    pub(crate) fn annotated(&self, annotation: &Expr) -> Kind {
        let name = match annotation {
            Expr::StringLiteral(s) => s.value.to_str().rsplit('.').next().unwrap_or_default(),
            other => last(other).unwrap_or_default(),
        };
        match name {
            "Tensor" | "FloatTensor" | "LongTensor" | "BoolTensor" => Kind::Tensor,
            "int" | "float" | "bool" | "str" | "dict" | "Dict" => Kind::Host,
            "DataLoader" => Kind::Loader,
            _ => Kind::Unknown,
        }
    }
}
