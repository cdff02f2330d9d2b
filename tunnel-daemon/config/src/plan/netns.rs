//! Network namespaces with captured processes, besides that of this process.

use std::path::{Path, PathBuf};
use std::str::FromStr;

/// Directory of the named namespaces of `ip netns`.
const NAMED: &str = "/run/netns";

/// One value of `--redirect-netns`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum NetnsChoice {
    /// All namespaces with processes of the captured cgroup.
    Auto,
    /// One namespace: a file such as `/run/netns/blue` or `/proc/4711/ns/net`.
    Path(PathBuf),
}

impl FromStr for NetnsChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            "" | "." | ".." => Err(format!(
                "{text:?} is no network namespace: write auto, the name of one below {NAMED}, or the path of its file, such as \
                 /proc/4711/ns/net"
            )),
            name if !name.contains('/') => Ok(Self::Path(Path::new(NAMED).join(name))),
            path if path.starts_with('/') => Ok(Self::Path(path.into())),
            path => Err(format!(
                "{path:?} does not begin with /: write the whole path"
            )),
        }
    }
}

/// The plan from `--redirect-netns`.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct NetnsPlan {
    /// Find namespaces by the processes of the captured cgroup.
    pub auto: bool,
    /// Files of namespaces, used while they exist.
    pub paths: Vec<PathBuf>,
}

impl NetnsPlan {
    /// Collects the values of the flag; `None` without any.
    #[must_use]
    pub fn of(choices: Vec<NetnsChoice>) -> Option<Self> {
        if choices.is_empty() {
            return None;
        }
        let mut plan = Self::default();
        for choice in choices {
            match choice {
                NetnsChoice::Auto => plan.auto = true,
                NetnsChoice::Path(path) if plan.paths.contains(&path) => (),
                NetnsChoice::Path(path) => plan.paths.push(path),
            }
        }
        Some(plan)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn netns_values_are_auto_a_name_or_a_path() {
        for (text, choice) in [
            ("auto", NetnsChoice::Auto),
            ("blue", NetnsChoice::Path("/run/netns/blue".into())),
            ("/proc/7/ns/net", NetnsChoice::Path("/proc/7/ns/net".into())),
        ] {
            assert_eq!(text.parse(), Ok(choice), "{text}");
        }
        for text in ["", ".", "..", "ns/blue", "./blue"] {
            let error = text.parse::<NetnsChoice>().unwrap_err();
            assert!(error.contains(text) && error.contains("write"), "{error}");
        }
        let blue = || "blue".parse().unwrap();
        let plan = NetnsPlan::of(vec![blue(), NetnsChoice::Auto, blue()]).unwrap();
        assert_eq!((plan.auto, plan.paths.len()), (true, 1));
        assert_eq!(NetnsPlan::of(Vec::new()), None);
    }
}
