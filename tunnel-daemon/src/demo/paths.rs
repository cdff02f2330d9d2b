//! Paths of tunnels and movers of their bytes, from the server's own counters.

use super::world::World;

/// Counters, each with its text.
const COUNTERS: [(&str, &str); 6] = [
    ("adit_tunnels_opened_total{path=\"lane\"}", "on lanes"),
    ("adit_tunnels_opened_total{path=\"link\"}", "on the link"),
    (
        "adit_tunnels_opened_total{path=\"raw-lane\"}",
        "on raw lanes",
    ),
    (
        "adit_tunnels_opened_total{path=\"ktls-lane\"}",
        "on raw lanes with kernel TLS",
    ),
    ("adit_relay_bytes_total{mover=\"splice\"}", "bytes spliced"),
    ("adit_relay_bytes_total{mover=\"copy\"}", "bytes copied"),
];

/// Their values.
#[derive(Clone, Copy)]
pub(super) struct Paths([u64; COUNTERS.len()]);

impl Paths {
    /// Counts since the server started; the bytes are those of tunnels that have ended.
    pub(super) fn of(world: &World) -> Self {
        Self(COUNTERS.map(|(series, _text)| world.series(series)))
    }

    /// The number of tunnels on lanes since `before`, and a text about all counters that have moved.
    pub(super) fn since(self, before: Self) -> (u64, String) {
        let moved: [u64; COUNTERS.len()] = std::array::from_fn(|at| self.0[at] - before.0[at]);
        let [lane, _link, raw_lane, ktls_lane, ..] = moved;
        let texts = COUNTERS.iter().zip(moved).filter(|(_, count)| *count > 0);
        let texts = texts.map(|((_series, text), count)| format!("{count} {text}"));
        (
            lane + raw_lane + ktls_lane,
            texts.collect::<Vec<_>>().join(", "),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_name_only_used_paths() {
        let before = Paths([1, 2, 0, 0, 0, 0]);
        let framed = Paths([55, 4, 0, 0, 0, 0]).since(before);
        assert_eq!(framed, (54, "54 on lanes, 2 on the link".to_owned()));
        let raw = Paths([1, 2, 3, 0, 64, 1]).since(before);
        let text = "3 on raw lanes, 64 bytes spliced, 1 bytes copied";
        assert_eq!(raw, (3, text.to_owned()));
    }
}
