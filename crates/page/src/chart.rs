//! The geometry of charts; the templates draw it.

/// One bar of parts, with a limit.
pub struct Stack {
    /// The parts.
    pub parts: Vec<Part>,
    /// Where the limit is, in percent of the width.
    pub limit: Option<f64>,
    /// What is written at it.
    pub limit_label: String,
}

/// A part of a bar; widths are in percent.
pub struct Part {
    /// What it is called.
    pub label: &'static str,
    /// As it is shown.
    pub value: String,
    /// What it is made of.
    pub what: &'static str,
    /// Its colour.
    pub class: &'static str,
    /// Where it begins.
    pub start: f64,
    /// How wide it is.
    pub width: f64,
}

impl Stack {
    /// Label, explanation, class and size of each part.
    pub fn new(parts: &[(&'static str, &'static str, &'static str, u64)], limit: Option<u64>) -> Stack {
        let sum: u64 = parts.iter().map(|p| p.3).sum();
        let whole = sum.max(limit.unwrap_or(0)).max(1) as f64;
        let mut start = 0.0;
        let place = |&(label, what, class, n): &(&'static str, &'static str, &'static str, u64)| {
            let width = 100.0 * n as f64 / whole;
            let part = Part { label, what, class, value: oxitorch_format::bytes(n), start, width };
            start += width;
            part
        };
        let parts = parts.iter().map(place).collect();
        let limit_label = limit.map_or_else(String::new, |l| format!("limit {}", oxitorch_format::bytes(l)));
        Stack { parts, limit: limit.map(|l| 100.0 * l as f64 / whole), limit_label }
    }
}

/// Pairs of bars.
pub struct Bars {
    /// Name and class of each bar of a pair.
    pub legend: Vec<(&'static str, &'static str)>,
    /// One below the other.
    pub rows: Vec<BarRow>,
}

/// Bars of one thing; widths are in percent.
pub struct BarRow {
    /// What it is called.
    pub label: String,
    /// Class, width and value of each.
    pub bars: Vec<(&'static str, f64, String)>,
}

/// Programs under the roof that a chip is: operations in a second over operations for a byte, both as logarithms.
pub struct Roofline {
    /// Points of the roof's line.
    pub roof: String,
    /// What is written at the roof.
    pub peak: String,
    /// What is written at the slope.
    pub bandwidth: String,
    /// The points.
    pub points: Vec<Point>,
    /// Lines of the grid with their labels.
    pub columns: Vec<(f64, String)>,
    /// One below the other.
    pub rows: Vec<(f64, String)>,
    /// Where the slope ends.
    pub ridge: (f64, f64),
    /// The middle of the slope.
    pub slope: (f64, f64),
}

/// A program.
pub struct Point {
    /// From the left.
    pub x: f64,
    /// From the top.
    pub y: f64,
    /// How large it is.
    pub radius: f64,
    /// What it is called.
    pub label: String,
    /// Shown when the pointer rests there.
    pub title: String,
    /// Where the label stands: to the left where there is no room to the right.
    pub left: bool,
}

/// What a program does: operations for a byte, operations in a second at best, share of the step's time.
pub struct Dot {
    /// Operations for a byte.
    pub intensity: f64,
    /// Operations a second.
    pub flops_per_s: f64,
    /// Of the whole.
    pub share: f64,
    /// What it is called.
    pub label: String,
    /// Shown when the pointer rests there.
    pub title: String,
}

/// The drawing, without the room for labels.
pub(crate) const WIDTH: f64 = 600.0;
/// The height of the drawing.
pub(crate) const HEIGHT: f64 = 240.0;
/// The room that a point with its label takes.
const LABEL: (f64, f64) = (160.0, 16.0);

impl Roofline {
    /// For a device of so many operations and bytes in a second. None if there is nothing to draw.
    pub fn new(peak: f64, bandwidth: f64, dots: Vec<Dot>) -> Option<Roofline> {
        let dots: Vec<Dot> = dots.into_iter().filter(|d| d.intensity > 0.0 && d.flops_per_s > 0.0).collect();
        if dots.is_empty() || peak <= 0.0 || bandwidth <= 0.0 {
            return None;
        }
        let ridge = peak / bandwidth;
        let least = dots.iter().map(|d| d.intensity).fold(ridge, f64::min);
        let most = dots.iter().map(|d| d.intensity).fold(ridge, f64::max);
        let (left, right) = ((least / 3.0).log10().floor(), (most * 3.0).log10().ceil());
        let lowest = dots.iter().map(|d| d.flops_per_s).fold(peak, f64::min);
        let (bottom, top) = ((lowest / 3.0).log10().floor(), (peak * 2.0).log10().ceil());
        let x = |v: f64| WIDTH * (v.log10() - left) / (right - left);
        let y = |v: f64| HEIGHT * (top - v.log10()) / (top - bottom);
        // The slope begins at the left edge, or where it comes up from below.
        let start = (10f64.powf(bottom) / bandwidth).max(10f64.powf(left));
        let corners = [(start, start * bandwidth), (ridge, peak), (10f64.powf(right), peak)];
        let roof: Vec<String> = corners.iter().map(|(i, f)| format!("{:.1},{:.1}", x(*i), y(*f))).collect();
        let unit = oxitorch_format::amount;
        let column = |e: i32| (x(10f64.powi(e)), plain(10f64.powi(e)));
        let row = |e: i32| (y(10f64.powi(e)), format!("{}FLOP/s", unit(10f64.powi(e)).replace(".0", "")));
        let point = |d: Dot| {
            let at = x(d.intensity);
            let (radius, left) = (4.0 + 8.0 * d.share.clamp(0.0, 1.0).sqrt(), at > 0.6 * WIDTH);
            Point { x: at, y: y(d.flops_per_s), radius, label: d.label, title: d.title, left }
        };
        // Where points lie close together only the first is named; the others say their names when pointed at.
        let mut named: Vec<(f64, f64)> = Vec::new();
        let points = dots.into_iter().map(point).map(|mut p| {
            if named.iter().any(|(x, y)| (x - p.x).abs() < LABEL.0 && (y - p.y).abs() < LABEL.1) {
                p.label.clear();
            } else {
                named.push((p.x, p.y));
            }
            p
        });
        let points = points.collect();
        Some(Roofline {
            roof: roof.join(" "),
            peak: format!("{}FLOP/s bfloat16", unit(peak)),
            bandwidth: format!("{}B/s", unit(bandwidth)),
            points,
            columns: (left as i32..=right as i32).map(column).collect(),
            rows: (bottom as i32..=top as i32).map(row).collect(),
            ridge: (x(ridge), y(peak)),
            slope: (x((start * ridge).sqrt()), y((start * ridge).sqrt() * bandwidth)),
        })
    }
}

/// A power of ten as people write it.
fn plain(x: f64) -> String {
    if x >= 1.0 { oxitorch_format::amount(x).replace(".0", "") } else { format!("{x}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_of_a_bar_and_its_limit_lie_side_by_side() {
        let stack = Stack::new(&[("a", "", "", 30), ("b", "", "", 10)], Some(80));
        let places: Vec<_> = stack.parts.iter().map(|p| (p.start, p.width)).collect();
        assert_eq!((places, stack.limit), (vec![(0.0, 37.5), (37.5, 12.5)], Some(100.0)));
        // What does not fit goes beyond the limit.
        let stack = Stack::new(&[("a", "", "", 160)], Some(80));
        assert_eq!((stack.parts[0].width, stack.limit), (100.0, Some(50.0)));
        assert_eq!(Stack::new(&[("a", "", "", 0)], None).parts[0].width, 0.0);
    }

    #[test]
    fn programs_lie_under_the_roof() {
        let dot = |intensity, flops_per_s| Dot {
            intensity,
            flops_per_s,
            share: 0.5,
            label: String::new(),
            title: String::new(),
        };
        let roofline = Roofline::new(197e12, 819e9, vec![dot(10.0, 8.19e12), dot(1000.0, 197e12)]).unwrap();
        let [slow, quick] = &roofline.points[..] else { panic!("two points") };
        assert!((quick.y - roofline.ridge.1).abs() < 1e-9 && quick.x > roofline.ridge.0);
        assert!(slow.y > roofline.ridge.1 && slow.x < roofline.ridge.0);
        for p in &roofline.points {
            assert!((0.0..=WIDTH).contains(&p.x) && (0.0..=HEIGHT).contains(&p.y));
        }
        assert!(Roofline::new(197e12, 819e9, vec![dot(0.0, 1.0)]).is_none());
    }
}
