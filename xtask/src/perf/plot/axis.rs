//! Axes of a picture: where each begins and ends, and which values get a line and a label.

use std::ops::Range;

use plotters::coord::ranged1d::{
    KeyPointHint, KeyPointWeight, NoDefaultFormatting, Ranged, ValueFormatter,
};
use plotters::coord::types::RangedCoordf64;

/// Most steps of an axis from zero.
const STEPS_MAX: f64 = 8.0;

/// Most labels of a logarithmic axis; where there are more lines, only powers of ten have one.
const LABELS_MAX: usize = 16;

/// What two numbers that should be equal may differ by, relative to them.
const ROUNDING: f64 = 1e-9;

/// How values become places.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Scale {
    /// Amounts, from zero: lengths can be compared.
    Linear,
    /// Microseconds, by decades: one that takes seconds leaves room for those that take some hundred microseconds.
    Logarithmic,
}

/// A line across the picture, and what it is called, if it has room for that.
#[derive(Clone, Debug, PartialEq)]
struct Tick {
    at: f64,
    label: Option<String>,
}

/// See the module.
#[derive(Clone, Debug)]
pub(super) struct Axis {
    scale: Scale,
    range: Range<f64>,
    ticks: Vec<Tick>,
}

impl Axis {
    /// One that has room for all the values.
    pub(super) fn over(scale: Scale, values: impl Iterator<Item = f64>) -> Self {
        let (least, most) = values.fold((f64::INFINITY, 0.0_f64), |(least, most), value| {
            (least.min(value), most.max(value))
        });
        match scale {
            Scale::Linear => Self::from_zero(most),
            Scale::Logarithmic => Self::by_decades(least, most),
        }
    }

    /// A place of width 1 for each name, which stands in its middle.
    pub(super) fn of_names(names: &[&str]) -> Self {
        let tick = |(at, name): (usize, &&str)| Tick {
            at: at as f64 + 0.5,
            label: Some((*name).to_owned()),
        };
        Self {
            scale: Scale::Linear,
            range: 0.0..names.len().max(1) as f64,
            ticks: names.iter().enumerate().map(tick).collect(),
        }
    }

    fn from_zero(most: f64) -> Self {
        let most = if most > 0.0 { most } else { 1.0 };
        let step = step(most);
        let steps = (most / step - ROUNDING).ceil().max(1.0);
        let tick = |number: f64| Tick {
            at: number * step,
            label: Some(amount(number * step, step)),
        };
        let numbers = (0..=u8::MAX).map(f64::from);
        Self {
            scale: Scale::Linear,
            range: 0.0..steps * step,
            ticks: numbers
                .take_while(|number| *number <= steps)
                .map(tick)
                .collect(),
        }
    }

    fn by_decades(least: f64, most: f64) -> Self {
        let lines = decades();
        // Beyond the values, not at them, so that none lies on the edge.
        let below = lines.iter().copied().rfind(|line| *line < least);
        let start = below.unwrap_or(1.0);
        let above = |line: &f64| *line > most && *line > start;
        let end = lines.iter().copied().find(above).unwrap_or(start * 10.0);
        let range = start..=end;
        let shown: Vec<(usize, f64)> = lines
            .into_iter()
            .enumerate()
            .filter(|(_, line)| range.contains(line))
            .collect();
        let is_roomy = shown.len() <= LABELS_MAX;
        let tick = |(number, at): (usize, f64)| Tick {
            at,
            label: (is_roomy || number.is_multiple_of(3)).then(|| time(at)),
        };
        Self {
            scale: Scale::Logarithmic,
            range: start..end,
            ticks: shown.into_iter().map(tick).collect(),
        }
    }
}

impl Ranged for Axis {
    type FormatOption = NoDefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, limit: (i32, i32)) -> i32 {
        let Range { start, end } = self.range;
        match self.scale {
            Scale::Linear => RangedCoordf64::from(start..end).map(value, limit),
            Scale::Logarithmic => {
                let value = value.clamp(start, end).ln();
                RangedCoordf64::from(start.ln()..end.ln()).map(&value, limit)
            }
        }
    }

    fn key_points<Hint: KeyPointHint>(&self, hint: Hint) -> Vec<f64> {
        let ticks = self.ticks.iter().filter(|tick| match hint.weight() {
            KeyPointWeight::Bold => tick.label.is_some(),
            KeyPointWeight::Any => true,
        });
        ticks.map(|tick| tick.at).collect()
    }

    fn range(&self) -> Range<f64> {
        self.range.clone()
    }
}

impl ValueFormatter<f64> for Axis {
    fn format_ext(&self, value: &f64) -> String {
        let tick = self.ticks.iter().find(|tick| tick.at == *value);
        tick.and_then(|tick| tick.label.clone()).unwrap_or_default()
    }
}

/// 1, 2 or 5 of some decade, so that there are at most [`STEPS_MAX`] of them.
fn step(most: f64) -> f64 {
    let least = most / STEPS_MAX;
    let decade = 10.0_f64.powf(least.log10().floor());
    [1.0, 2.0, 5.0]
        .into_iter()
        .map(|factor| factor * decade)
        .find(|step| *step >= least * (1.0 - ROUNDING))
        .unwrap_or(10.0 * decade)
}

/// 1, 2 and 5 of each decade, from a microsecond to more than an hour.
fn decades() -> Vec<f64> {
    let mut lines = Vec::new();
    let mut decade = 1.0;
    while decade < 1e10 {
        lines.extend([decade, 2.0 * decade, 5.0 * decade]);
        decade *= 10.0;
    }
    lines
}

/// As many decimals as steps of this size take, and commas between thousands.
fn amount(value: f64, step: f64) -> String {
    if step > 0.9 {
        return grouped(value);
    }
    let decimals = [0.09, 0.009].into_iter().filter(|most| step < *most);
    let decimals = 1 + decimals.count();
    format!("{value:.decimals$}")
}

fn grouped(value: f64) -> String {
    let digits = format!("{value:.0}");
    let mut text = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// In the unit that keeps the number short.
fn time(microseconds: f64) -> String {
    if microseconds < 1e3 {
        return format!("{microseconds} us");
    }
    if microseconds < 1e6 {
        return format!("{} ms", microseconds / 1e3);
    }
    format!("{} s", microseconds / 1e6)
}

#[cfg(test)]
mod tests {
    use plotters::coord::ranged1d::BoldPoints;

    use super::*;

    fn over(scale: Scale, values: &[f64]) -> Axis {
        Axis::over(scale, values.iter().copied())
    }

    fn labels(axis: &Axis) -> Vec<String> {
        let labelled = axis.key_points(BoldPoints(10)).into_iter();
        labelled.map(|at| axis.format_ext(&at)).collect()
    }

    #[test]
    fn logarithmic_axis_has_1_2_and_5_of_each_decade_in_their_unit() {
        let axis = over(Scale::Logarithmic, &[741.0, 300.0, 90_000.0]);
        assert_eq!(
            labels(&axis),
            [
                "200 us", "500 us", "1 ms", "2 ms", "5 ms", "10 ms", "20 ms", "50 ms", "100 ms"
            ]
        );
    }

    #[test]
    fn many_decades_have_labels_at_powers_of_ten_and_lines_between() {
        let axis = over(Scale::Logarithmic, &[5.0, 4e6]);
        assert_eq!(
            labels(&axis),
            ["10 us", "100 us", "1 ms", "10 ms", "100 ms", "1 s"]
        );
        assert_eq!(axis.range(), 2.0..5e6);
        assert_eq!(axis.key_points(100).len(), 20, "with those between");
    }

    #[test]
    fn value_of_seconds_leaves_room_between_values_of_microseconds() {
        let axis = over(Scale::Logarithmic, &[300.0, 600.0, 5e6]);
        let [low, high, hanging] = [300.0, 600.0, 5e6].map(|value| axis.map(&value, (0, 400)));
        assert!(high - low > 20, "{low} and {high}");
        assert!(hanging < 400, "{hanging}");
        // Nothing has no place on it; its edge is the nearest.
        assert_eq!(axis.map(&0.0, (0, 400)), 0);
    }

    #[test]
    fn linear_axis_begins_at_zero_and_ends_at_a_round_number_above() {
        let axis = over(Scale::Linear, &[27.3, 14.0]);
        assert_eq!(labels(&axis), ["0", "5", "10", "15", "20", "25", "30"]);
        let axis = over(Scale::Linear, &[4000.0]);
        assert_eq!(axis.range(), 0.0..4000.0);
        assert_eq!(labels(&axis).last().unwrap(), "4,000");
        assert_eq!(grouped(1_234_567.0), "1,234,567");
    }

    #[test]
    fn small_amounts_have_decimals_and_nothing_at_all_still_has_an_axis() {
        let axis = over(Scale::Linear, &[0.77]);
        let labels_of = labels(&axis);
        assert_eq!(labels_of.first().unwrap(), "0.0");
        assert_eq!(labels_of.last().unwrap(), "0.8");
        assert_eq!(amount(0.05, 0.05), "0.05");
        assert_eq!(over(Scale::Linear, &[0.0]).range(), 0.0..1.0);
        assert!(!labels(&over(Scale::Logarithmic, &[])).is_empty());
    }

    #[test]
    fn names_stand_in_the_middle_of_their_places() {
        let axis = Axis::of_names(&["down x1", "up x1"]);
        assert_eq!(axis.range(), 0.0..2.0);
        assert_eq!(axis.key_points(10), [0.5, 1.5]);
        assert_eq!(labels(&axis), ["down x1", "up x1"]);
    }
}
