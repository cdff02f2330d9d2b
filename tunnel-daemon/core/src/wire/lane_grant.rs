//! The permission to bind lanes to a link: headers in a server's answer to `Connect`.

use std::fmt;

use zeroize::Zeroizing;

use crate::ids::LinkId;

/// Response header: the link's id, decimal.
pub(super) const LANE_LINK: &str = "adit-lane-link";
/// Response header: the link's secret, hexadecimal.
pub(super) const LANE_SECRET: &str = "adit-lane-secret";
/// Response header: most lanes of this link, decimal.
pub(super) const LANE_MAX: &str = "adit-lane-max";

/// Bytes of a link's secret.
pub const LANE_SECRET_BYTES: usize = 32;

/// Permission to bind lanes to a link; expires with the link. `Debug` does not show the secret, and dropping clears it.
#[derive(Clone, PartialEq, Eq)]
pub struct LaneGrant {
    /// The server's id of the link.
    pub link: LinkId,
    /// Key of the lanes' proofs.
    pub secret: Zeroizing<[u8; LANE_SECRET_BYTES]>,
    /// Most lanes at once.
    pub lanes_max: u32,
}

impl LaneGrant {
    pub(super) fn push_to(&self, pairs: &mut Vec<(&'static str, String)>) {
        pairs.push((LANE_LINK, self.link.0.to_string()));
        pairs.push((LANE_SECRET, to_hex(&self.secret[..])));
        pairs.push((LANE_MAX, self.lanes_max.to_string()));
    }
}

impl fmt::Debug for LaneGrant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LaneGrant")
            .field("link", &self.link)
            .field("lanes_max", &self.lanes_max)
            .finish_non_exhaustive()
    }
}

/// Collects the headers. If one is missing, repeated or invalid, there is no grant and the link works without lanes.
#[derive(Default)]
pub(super) struct LaneGrantHeaders {
    seen: usize,
    link: Option<LinkId>,
    secret: Option<Zeroizing<[u8; LANE_SECRET_BYTES]>>,
    lanes_max: Option<u32>,
}

impl LaneGrantHeaders {
    pub(super) fn note(&mut self, name: &str, value: &str) {
        match name {
            LANE_LINK => self.link = value.parse().ok().map(LinkId),
            LANE_SECRET => self.secret = from_hex(value),
            LANE_MAX => self.lanes_max = value.parse().ok(),
            _ => return,
        }
        self.seen += 1;
    }

    pub(super) fn grant(self) -> Option<LaneGrant> {
        if self.seen != 3 {
            return None;
        }
        Some(LaneGrant {
            link: self.link?,
            secret: self.secret?,
            lanes_max: self.lanes_max?,
        })
    }
}

fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn from_hex(text: &str) -> Option<Zeroizing<[u8; LANE_SECRET_BYTES]>> {
    let mut bytes = Zeroizing::new([0; LANE_SECRET_BYTES]);
    if text.len() != 2 * bytes.len() || !text.is_ascii() {
        return None;
    }
    for (at, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(text.get(2 * at..2 * at + 2)?, 16).ok()?;
    }
    Some(bytes)
}
