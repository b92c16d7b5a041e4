//! Windows that slide over dimensions that vary: their reductions, and convolutions.

use super::layout::Dim;
use super::rules::Pair;
use super::{Bounding, Laid, Result};
use crate::ir::*;

impl Bounding<'_> {
    pub(super) fn reduce_window(
        &mut self,
        pair: Pair<'_>,
        mut args: Vec<Laid>,
        a: &Window,
        b: &Window,
    ) -> Result<Vec<Laid>> {
        let starts = args.split_off(args.len() / 2);
        let mut xs = self.alike(args)?;
        let rank = a.dims.len();
        let is_whole = |d: usize| {
            let same = a.dims[d] == 1 && b.dims[d] == 1 && a.strides[d] == 1 && b.strides[d] == 1;
            same && a.padding[d] == (0, 0) && b.padding[d] == (0, 0) && a.base_dilations[d] == 1
        };
        for x in &mut xs {
            *x = self.prefixed(x.clone(), |d| !is_whole(d))?;
        }
        let steps = (&a.strides, &a.base_dilations, &a.window_dilations);
        if steps != (&b.strides, &b.base_dilations, &b.window_dilations) {
            return Err("the steps of a window depend on the size".into());
        }
        for d in (0..rank).filter(|&d| !is_whole(d)) {
            let same = a.dims[d] == b.dims[d] && a.padding[d].0 == b.padding[d].0;
            // All elements up to each, or all from each on: what is not used is as if it were not there.
            let plain = a.strides[d] == 1 && a.base_dilations[d] == 1 && a.window_dilations[d] == 1;
            let up_to = |w: &Window| w.padding[d] == (w.dims[d] - 1, 0);
            let from = |w: &Window| w.padding[d] == (0, w.dims[d] - 1);
            if !same && !(plain && (up_to(a) && up_to(b) || from(a) && from(b))) {
                return Err("the window depends on the size".into());
            }
        }
        let over: Vec<usize> = (0..rank).filter(|&d| !is_whole(d)).collect();
        let made = self.reduced(pair, &xs, &starts, &over)?;
        let of = |d: usize| match is_whole(d) {
            true => Dim { even: false, ..xs[0].layout[d].clone() },
            false => pair.dim(d),
        };
        let layout: Vec<Dim> = (0..rank).map(of).collect();
        Ok(made.into_iter().map(|v| Laid { v, layout: layout.clone() }).collect())
    }

    pub(super) fn select_and_scatter(
        &mut self,
        pair: Pair<'_>,
        mut args: Vec<Laid>,
        w: &Window,
    ) -> Result<Laid> {
        let start = args.remove(2);
        for d in 0..w.dims.len() {
            let plain = w.dims[d] == 1 && w.strides[d] == 1 && w.padding[d] == (0, 0);
            if args[0].layout[d].varies() && !plain {
                return Err("no rule is known for it where sizes vary".into());
            }
        }
        let (source, mut x) = (args.remove(1), args.remove(0));
        let mut source = source;
        for d in (0..w.dims.len()).filter(|&d| w.dims[d] == 1 && w.strides[d] == 1) {
            (x, source) = self.paired((x, d), (source, d))?;
        }
        let regions = [0, 1].map(|i| self.region(pair.p.regions[i], pair.s.regions[i]));
        let [first, second] = regions;
        let operands = [x.v, source.v, start.v];
        let v = self.b.copied(pair.p.op.clone(), &operands, &[], &[first?, second?])[0];
        Ok(Laid { v, layout: x.layout.into_iter().map(|d| Dim { even: false, ..d }).collect() })
    }

    pub(super) fn convolution(
        &mut self,
        pair: Pair<'_>,
        mut args: Vec<Laid>,
        a: &Convolution,
        b: &Convolution,
    ) -> Result<Laid> {
        let same = Convolution { padding: b.padding.clone(), ..a.clone() } == *b;
        let low = |c: &Convolution| c.padding.iter().map(|p| p.0).collect::<Vec<_>>();
        if !same || low(a) != low(b) {
            return Err("where a convolution begins depends on the size".into());
        }
        let c = &a.dims;
        let (mut kernel, mut x) = (args.remove(1), args.remove(0));
        let at = |d: i64| d as usize;
        let spatial = |list: &crate::types::Dims| list.iter().map(|&d| d as usize).collect::<Vec<_>>();
        let (places, windows) = (spatial(&c.input_spatial), spatial(&c.kernel_spatial));
        x = self.prefixed(x, |d| places.contains(&d))?;
        kernel = self.prefixed(kernel, |d| windows.contains(&d))?;
        if windows.iter().zip(&a.reversal).any(|(&d, &reversed)| reversed && kernel.layout[d].varies()) {
            return Err("a kernel that is read backwards has a size that varies".into());
        }
        let (batch, feature) = (at(c.input_batch), at(c.input_feature));
        // Groups of features take parts of the channels, and groups of the batch sum over all of them.
        let in_features = a.feature_group_count != 1;
        let in_batch = a.batch_group_count != 1;
        let channels = [&x.layout[feature], &kernel.layout[at(c.kernel_input_feature)]];
        let out_channels = &kernel.layout[at(c.kernel_output_feature)];
        if in_features && channels.iter().any(|d| d.varies())
            || in_batch && x.layout[batch].varies()
            || (in_features || in_batch) && out_channels.varies()
        {
            return Err("groups of what varies".into());
        }
        if !in_features {
            (x, kernel) = self.paired((x, feature), (kernel, at(c.kernel_input_feature)))?;
        }
        let mixed: Vec<usize> = places.iter().copied().chain([feature]).collect();
        let left = self.zeroed(&x, &mixed);
        let mixed: Vec<usize> = windows.iter().copied().chain([at(c.kernel_input_feature)]).collect();
        let right = self.zeroed(&kernel, &mixed);
        let v = self.b.convolution(left, right, a.clone());
        let mut layout: Vec<Dim> = (0..pair.bound.rank()).map(|d| pair.dim(d)).collect();
        if !in_batch {
            layout[at(c.output_batch)] = Dim { even: false, ..x.layout[batch].clone() };
        }
        layout[at(c.output_feature)] =
            Dim { even: false, ..kernel.layout[at(c.kernel_output_feature)].clone() };
        Ok(Laid { v, layout })
    }
}
