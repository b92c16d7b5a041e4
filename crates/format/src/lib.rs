//! How sizes, times, counts, prices and Python lines are written for people.

/// 68719476736 -> "64.0 GiB".
pub fn bytes(n: u64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut size = n as f64;
    let mut unit = 0;
    while size >= 1024.0 && unit + 1 < units.len() {
        size /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{n} B") } else { format!("{size:.1} {}", units[unit]) }
}

/// At most so many characters.
pub fn cut(text: &str, chars: usize) -> String {
    match text.char_indices().nth(chars) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text.to_owned(),
    }
}

/// "3 programs".
pub fn many(n: u64, what: &str) -> String {
    format!("{n} {what}{}", if n == 1 { "" } else { "s" })
}

/// "15 ms", "2.5 s", "3.1 min", "2.0 h".
pub fn duration(time: std::time::Duration) -> String {
    match time.as_secs_f64() {
        s if s < 1.0 => format!("{:.0} ms", s * 1e3),
        s if s < 60.0 => format!("{s:.1} s"),
        s if s < 3600.0 => format!("{:.1} min", s / 60.0),
        s => format!("{:.1} h", s / 3600.0),
    }
}

/// 1234567 -> "1.2 M".
pub fn amount(n: f64) -> String {
    let units = ["", " k", " M", " G", " T", " P"];
    let unit = if n >= 1000.0 { ((n.log10() / 3.0) as usize).min(units.len() - 1) } else { 0 };
    let n = n / 1000f64.powi(unit as i32);
    if unit == 0 { format!("{n:.0}") } else { format!("{n:.1}{}", units[unit]) }
}

/// `train.py:8` of `/home/me/train.py:8 in step`.
pub fn short(line: &str) -> &str {
    let place = line.split(" in ").next().unwrap_or(line);
    place.rsplit('/').next().unwrap_or(place)
}

/// "$4.20", "$0.0042", "$1,234,567".
pub fn usd(x: f64) -> String {
    if x > 0.0 && x < 0.01 {
        let digits = (1.0 - x.log10().floor()).min(18.0) as usize;
        return format!("${x:.digits$}");
    }
    if x < 1000.0 {
        return format!("${x:.2}");
    }
    let digits = format!("{x:.0}");
    let mut out = String::from("$");
    for (i, c) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(c);
    }
    out
}

/// A line with the last part of each path alone.
pub fn brief(text: &str) -> String {
    let word = |w: &str| w.rsplit('/').next().unwrap_or(w).to_owned();
    let words = text.split(' ').map(|w| if w.starts_with('/') { word(w) } else { w.to_owned() });
    words.collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        assert_eq!(bytes(1023), "1023 B");
        assert_eq!(bytes(64 << 30), "64.0 GiB");
        assert_eq!(bytes(3 << 50), "3072.0 TiB");
    }

    #[test]
    fn amounts_are_short() {
        assert_eq!([0.0, 999.0, 1000.0, 2.5e6, 3e12].map(amount), ["0", "999", "1.0 k", "2.5 M", "3.0 T"]);
    }

    #[test]
    fn lines_are_short() {
        assert_eq!(short("/home/me/train.py:8 in step"), "train.py:8");
        assert_eq!(short("train.py:8"), "train.py:8");
    }

    #[test]
    fn dollars() {
        for (x, text) in [
            (0.0, "$0.00"),
            (0.0000042, "$0.0000042"),
            (0.00999, "$0.0100"),
            (4.2, "$4.20"),
            (1234567.0, "$1,234,567"),
            (1000.0, "$1,000"),
        ] {
            assert_eq!(usd(x), text);
        }
    }
}
