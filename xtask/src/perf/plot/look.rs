//! What the lines, markers and bars of a peer look like: the same in all pictures, told apart without seeing colours.

use std::collections::BTreeMap;

use plotters::style::RGBColor;

// The colours of Okabe and Ito, which those who do not see all colours can tell apart, without their yellow, which
// hardly shows on white, and with a grey.
const BLACK: RGBColor = RGBColor(0, 0, 0);
const GREY: RGBColor = RGBColor(128, 128, 128);
const ORANGE: RGBColor = RGBColor(230, 159, 0);
const SKY: RGBColor = RGBColor(86, 180, 233);
const GREEN: RGBColor = RGBColor(0, 158, 115);
const BLUE: RGBColor = RGBColor(0, 114, 178);
const VERMILION: RGBColor = RGBColor(213, 94, 0);
const PURPLE: RGBColor = RGBColor(204, 121, 167);

const COLORS: [RGBColor; 8] = [VERMILION, GREEN, PURPLE, ORANGE, SKY, BLACK, GREY, BLUE];

/// Shape of a point.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Marker {
    /// Round.
    Circle,
    /// On its side.
    Square,
    /// On its corner.
    Diamond,
    /// A triangle that points up.
    Up,
    /// A triangle that points down.
    Down,
}

const MARKERS: [Marker; 5] = [
    Marker::Square,
    Marker::Up,
    Marker::Down,
    Marker::Diamond,
    Marker::Circle,
];

/// How a colour is used, so that two peers can share one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fill {
    /// Lines without gaps, markers and bars full of the colour.
    Solid,
    /// Dashes, and outlines of markers and bars.
    Hollow,
}

/// See the module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Look {
    /// Of everything.
    pub(super) color: RGBColor,
    /// How it is used.
    pub(super) fill: Fill,
    /// At each point.
    pub(super) marker: Marker,
    /// Width of lines, in pixels.
    pub(super) width: u32,
    /// From the middle of a marker to its edge, in pixels.
    pub(super) radius: i32,
}

impl Look {
    const fn new(color: RGBColor, fill: Fill, marker: Marker) -> Self {
        Self {
            color,
            fill,
            marker,
            width: 2,
            radius: 4,
        }
    }

    /// Whether the two cannot be told apart where there are no markers.
    fn resembles(&self, other: &Self) -> bool {
        self.color == other.color && self.fill == other.fill
    }
}

/// Ours, which the report is about.
const ADIT: Look = Look {
    width: 4,
    radius: 6,
    ..Look::new(BLUE, Fill::Solid, Marker::Circle)
};

/// For one that is not in the run.
const STRANGER: Look = Look::new(BLACK, Fill::Hollow, Marker::Square);

/// Peers this harness knows. Relatives share a colour; a relay and the peers of a stack are never in one picture.
const KNOWN: [(&str, Look); 20] = {
    use Fill::{Hollow, Solid};
    use Marker::{Circle, Diamond, Down, Square, Up};
    [
        ("direct", Look::new(GREY, Solid, Down)),
        ("upstream", Look::new(VERMILION, Solid, Square)),
        ("adit", ADIT),
        ("adit-link", Look::new(BLUE, Hollow, Circle)),
        ("adit-plaintext", Look::new(SKY, Solid, Circle)),
        ("adit-redirect", Look::new(SKY, Hollow, Circle)),
        ("adit-server", Look::new(GREEN, Solid, Up)),
        ("adit-agent", Look::new(PURPLE, Solid, Down)),
        ("haproxy", Look::new(ORANGE, Solid, Diamond)),
        ("haproxy-plaintext", Look::new(ORANGE, Hollow, Diamond)),
        ("rathole", Look::new(BLACK, Solid, Square)),
        ("openvpn", Look::new(GREEN, Hollow, Diamond)),
        ("wireguard", Look::new(PURPLE, Hollow, Up)),
        ("relay-epoll-copy", Look::new(BLUE, Hollow, Circle)),
        ("relay-epoll-splice", Look::new(BLUE, Solid, Circle)),
        ("relay-io-uring-copy", Look::new(GREEN, Hollow, Up)),
        ("relay-io-uring-splice", Look::new(GREEN, Solid, Up)),
        ("relay-tokio", Look::new(ORANGE, Solid, Diamond)),
        ("relay-tokio-uring", Look::new(ORANGE, Hollow, Diamond)),
        ("relay-ring-splice", Look::new(PURPLE, Solid, Square)),
    ]
};

/// Looks of all peers of a run, by name.
#[derive(Debug)]
pub(super) struct Looks(BTreeMap<String, Look>);

impl Looks {
    /// Gives each peer that is not known a look that no other has, as long as there are some.
    pub(super) fn new(peers: &[&str]) -> Self {
        let mut taken = vec![ADIT];
        taken.extend(peers.iter().filter_map(|peer| known(peer)));
        let all = [Fill::Solid, Fill::Hollow].into_iter().flat_map(|fill| {
            let colors = COLORS.into_iter().zip(MARKERS.into_iter().cycle());
            colors.map(move |(color, marker)| Look::new(color, fill, marker))
        });
        let spare: Vec<Look> = all
            .filter(|look| !taken.iter().any(|other| look.resembles(other)))
            .collect();
        let mut spare = spare.into_iter().cycle();
        let mut looks = BTreeMap::new();
        for peer in peers {
            if let Some(look) = known(peer).or_else(|| spare.next()) {
                looks.insert((*peer).to_owned(), look);
            }
        }
        Self(looks)
    }

    /// That of a peer.
    pub(super) fn of(&self, peer: &str) -> Look {
        self.0.get(peer).copied().unwrap_or(STRANGER)
    }
}

fn known(peer: &str) -> Option<Look> {
    let (_, look) = KNOWN.iter().find(|(name, _)| *name == peer)?;
    Some(*look)
}

#[cfg(test)]
mod tests {
    use super::*;

    const RELAYS: &str = "relay-";

    #[test]
    fn known_peers_of_one_picture_can_be_told_apart() {
        for (at, (name, look)) in KNOWN.iter().enumerate() {
            for (other, other_look) in &KNOWN[at + 1..] {
                let share = name.starts_with(RELAYS) == other.starts_with(RELAYS)
                    || [*name, *other].contains(&"direct");
                assert!(!share || !look.resembles(other_look), "{name}, {other}");
            }
        }
    }

    #[test]
    fn adit_has_the_thickest_line_and_no_other_peer_its_look() {
        let looks = Looks::new(&["theirs", "adit", "upstream", "more"]);
        let ours = looks.of("adit");
        for other in ["theirs", "upstream", "more"] {
            assert!(looks.of(other).width < ours.width, "{other}");
            assert!(!looks.of(other).resembles(&ours), "{other}");
        }
        assert!(!looks.of("theirs").resembles(&looks.of("more")));
        assert!(!looks.of("theirs").resembles(&looks.of("upstream")));
    }

    #[test]
    fn look_does_not_depend_on_who_else_is_in_the_run() {
        let few = Looks::new(&["adit", "haproxy"]);
        let many = Looks::new(&["direct", "upstream", "adit", "mine", "haproxy"]);
        for peer in ["adit", "haproxy"] {
            assert_eq!(few.of(peer), many.of(peer));
        }
    }

    #[test]
    fn more_peers_than_looks_still_have_one_each() {
        let names: Vec<String> = (0..40).map(|number| format!("peer-{number}")).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        assert_eq!(Looks::new(&names).0.len(), 40);
    }
}
