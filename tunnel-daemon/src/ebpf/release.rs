//! Kernel releases.

use std::fmt;

/// `6.12.104` of `6.12.104-1-amd64`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct Release {
    pub(super) major: u32,
    pub(super) minor: u32,
    pub(super) patch: u32,
}

/// The relay's floor on io_uring, and that of everything measured.
pub(super) const FLOOR: Release = Release::new(6, 1, 0);
/// From here on the kernel moves more than one page at once from a pipe to a socket.
pub(super) const SPLICE_BATCHED: Release = Release::new(6, 5, 0);

impl Release {
    pub(super) const fn new(major: u32, minor: u32, patch: u32) -> Self {
        Self {
            major,
            minor,
            patch,
        }
    }

    /// `None`: it does not begin with two numbers.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let mut parts = text.split(['.', '-', '+', '~', '_', ' ']);
        let mut number = || parts.next()?.parse::<u32>().ok();
        let (major, minor) = (number()?, number()?);
        Some(Self::new(major, minor, number().unwrap_or(0)))
    }
}

impl fmt::Display for Release {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases_of_distributions_are_understood() {
        for (text, expected) in [
            ("6.12.104-1-amd64", Some(Release::new(6, 12, 104))),
            ("6.1.0", Some(Release::new(6, 1, 0))),
            ("7.2-rc1", Some(Release::new(7, 2, 0))),
            ("5.15.0-1053-aws", Some(Release::new(5, 15, 0))),
            ("linux", None),
            ("6", None),
        ] {
            assert_eq!(Release::parse(text), expected, "{text}");
        }
    }
}
