//! Output of `--version` and `adit version`: version, commit, and the matching upstream release.

use serde::Serialize;

/// Upstream's release whose flags, metrics and protocol this program matches; all rows of docs/compatibility.md refer to it.
macro_rules! upstream {
    () => {
        "v0.36.0"
    };
}

/// Suffix of a build with the feature `fips`.
#[cfg(feature = "fips")]
macro_rules! cryptography {
    () => {
        "; FIPS cryptography"
    };
}
#[cfg(not(feature = "fips"))]
macro_rules! cryptography {
    () => {
        ""
    };
}

/// One line, without the program's name.
pub(super) const TEXT: &str = concat!(
    env!("CARGO_PKG_VERSION"),
    " (",
    env!("ADIT_COMMIT_TEXT"),
    "; matches Konnectivity ",
    upstream!(),
    cryptography!(),
    ")"
);

/// The version as JSON.
#[derive(Serialize, Debug)]
struct Version {
    version: &'static str,
    /// First 12 digits of the commit hash; absent if the build recorded none.
    commit: Option<&'static str>,
    /// Date of the commit, as `2026-01-31`.
    commit_date: Option<&'static str>,
    /// A tag of kubernetes-sigs/apiserver-network-proxy.
    upstream: &'static str,
    /// Whether the cryptography is aws-lc's FIPS build.
    fips: bool,
}

/// One line with a JSON object.
pub(super) fn json() -> String {
    let known = |text: &'static str| (!text.is_empty()).then_some(text);
    let version = Version {
        version: env!("CARGO_PKG_VERSION"),
        commit: known(env!("ADIT_COMMIT")),
        commit_date: known(env!("ADIT_COMMIT_DATE")),
        upstream: upstream!(),
        fips: cfg!(feature = "fips"),
    };
    // Serializing strings and a boolean cannot fail.
    let object = serde_json::to_string(&version).unwrap_or_default();
    format!("{object}\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn version_names_the_commit_and_the_release_of_the_compatibility_page() {
        let page = include_str!("../../../docs/compatibility.md");
        assert!(page.contains(concat!("| ", upstream!(), " | all rows")));
        assert!(
            TEXT.starts_with(concat!(env!("CARGO_PKG_VERSION"), " (")),
            "{TEXT}"
        );
        assert!(
            TEXT.ends_with(concat!(
                "matches Konnectivity ",
                upstream!(),
                cryptography!(),
                ")"
            )),
            "{TEXT}"
        );
        let json: serde_json::Value = serde_json::from_str(&json()).unwrap();
        assert_eq!(json["version"], env!("CARGO_PKG_VERSION"));
        assert_eq!(json["upstream"], upstream!());
        assert_eq!(json["fips"], cfg!(feature = "fips"));
        match json["commit"].as_str() {
            Some(commit) => {
                assert!(TEXT.contains(&format!("commit {commit} of ")), "{TEXT}");
                assert_eq!(
                    json["commit_date"].as_str().map(str::len),
                    Some("2026-01-31".len())
                );
            }
            None => assert!(TEXT.contains("no commit recorded"), "{TEXT}"),
        }
    }
}
