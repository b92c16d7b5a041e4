//! Computations that were left open in the outline, now that sizes are known.

use super::layout::Dim;
use super::rules::Pair;
use super::{Bounding, Laid, Result};
use crate::ir::*;

impl Bounding<'_> {
    pub(super) fn deferred(
        &mut self,
        pair: Pair<'_>,
        mut args: Vec<Laid>,
        d: &Deferred,
    ) -> Result<Vec<Laid>> {
        let axes = &d.axes;
        let dims = |labels: &[String], of: &str| -> Vec<Vec<usize>> {
            let within =
                |own: &String| own.char_indices().filter(|(_, c)| of.contains(*c)).map(|(i, _)| i).collect();
            labels.iter().map(within).collect()
        };
        for (x, first) in args.iter_mut().zip(dims(&axes.operands, &axes.first)) {
            *x = self.prefixed(x.clone(), |i| first.contains(&i))?;
        }
        let mut laid: Vec<(char, Dim)> = Vec::new();
        let mut labels: Vec<char> = axes.operands.iter().flat_map(|own| own.chars()).collect();
        labels.sort_unstable();
        labels.dedup();
        for label in labels {
            let places: Vec<(usize, usize)> =
                axes.operands.iter().enumerate().filter_map(|(i, own)| Some((i, own.find(label)?))).collect();
            let firm = places.iter().find(|&&(i, at)| !args[i].layout[at].even).or(places.first());
            let Some(&(i, at)) = firm else { continue };
            let to = Dim { even: false, ..args[i].layout[at].clone() };
            if to.varies() && axes.fixed.contains(label) {
                return Err("groups of what varies".into());
            }
            for (i, at) in places {
                args[i] = self.relaid(args[i].clone(), at, &to)?;
            }
            laid.push((label, to));
        }
        let mut operands = Vec::new();
        for (x, mixed) in args.iter().zip(dims(&axes.operands, &axes.mixed)) {
            operands.push(self.zeroed(x, &mixed));
        }
        let own = |label: char| laid.iter().find(|(known, _)| *known == label).map(|(_, dim)| dim.clone());
        let mut used = Vec::new();
        for dim in axes.used.chars().map(own) {
            used.push(dim.filter(Dim::varies).map(|dim| self.mask(&dim)));
        }
        let made = self.lowered(d, &operands, &used);
        let mut results = Vec::new();
        for ((v, labels), (a, (b, c))) in made.into_iter().zip(&axes.results).zip(pair.results()) {
            let mut layout = self.default(a, b, c)?;
            for (dim, label) in layout.iter_mut().zip(labels.chars()) {
                *dim = own(label).unwrap_or_else(|| dim.clone());
            }
            results.push(Laid { v, layout });
        }
        Ok(results)
    }

    /// The results of a computation, in the new module.
    pub(super) fn lowered(&self, d: &Deferred, operands: &[Value], used: &[Option<Value>]) -> Vec<Value> {
        (self.deferred[d.number as usize])(&self.b, operands, used)
    }
}
