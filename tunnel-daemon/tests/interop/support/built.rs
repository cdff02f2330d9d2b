//! Builds the Go programs before the tests that run them.

use std::env;

use super::go::{Program, Release, binary, toolchain};
use super::wait::is_nightly;

/// Whether this run includes the release: all of them, unless `INTEROP_OLDER` names one older release.
fn has(release: Release) -> bool {
    let name = match release {
        Release::V0360 | Release::V0370 => return true,
        Release::V0340 => "v0.34.0",
        Release::V0303 => "v0.30.3",
    };
    env::var_os("INTEROP_OLDER").is_none_or(|only| only == name)
}

/// `cargo xtask test` runs this first, so that other tests find the programs.
#[test]
fn programs_are_built() {
    if toolchain().is_none() {
        return;
    }
    let mut programs = vec![Program::Peer, Program::OtherPeer(Release::V0370)];
    if is_nightly() {
        programs.push(Program::Suite);
    }
    for release in [Release::V0360, Release::V0340, Release::V0303] {
        if has(release) {
            programs.extend([Program::Server(release), Program::Agent(release)]);
            if release != Release::V0360 {
                programs.push(Program::OtherPeer(release));
            }
        }
    }
    for program in programs {
        assert!(binary(program).is_file(), "{program:?}");
    }
}
