//! Kernel releases.

use std::fmt;
use std::fs;

/// `6.12.104` of `6.12.104-1-amd64`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Release {
    pub(crate) major: u32,
    pub(crate) minor: u32,
    pub(crate) patch: u32,
}

/// Since this release our programs load without `CAP_PERFMON`.
pub(crate) const WITHOUT_PERFMON: Release = Release::new(6, 8, 0);

impl Release {
    /// `major.minor.patch`.
    #[must_use]
    pub const fn new(major: u32, minor: u32, patch: u32) -> Self {
        Self {
            major,
            minor,
            patch,
        }
    }

    /// The release of the running kernel; `None` without /proc.
    pub fn running() -> Option<Self> {
        Self::parse(&fs::read_to_string("/proc/sys/kernel/osrelease").ok()?)
    }

    /// `None`: the text does not begin with two numbers.
    pub fn parse(text: &str) -> Option<Self> {
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
    fn kernel_releases_of_distributions_are_parsed() {
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
