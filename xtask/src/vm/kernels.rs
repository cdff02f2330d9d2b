//! Kernels of a distribution, as packages: apt finds, verifies and fetches them with a separate configuration; they are
//! unpacked, never installed.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, bail};
use walkdir::WalkDir;

use crate::steps::{MINUTES_5, first_line, output_of, run_command};

/// The default kernels of the table: the oldest supported, the stable release's, and the newest packaged.
pub(super) const SERIES: &[&str] = &["6.1", "6.12", NEWEST];
/// The default kernel: it has the strictest verifier and the fewest features.
pub(super) const OLDEST: &str = "6.1";
/// Means the newest packaged series.
const NEWEST: &str = "newest";

/// The package mirror; each suite has other kernels.
const MIRROR: &str = "http://deb.debian.org";
const SUITES: &[(&str, &str)] = &[
    ("debian", "bookworm"),
    ("debian-security", "bookworm-security"),
    ("debian", "bookworm-backports"),
    ("debian", "trixie-backports"),
];
/// The keys with which apt verifies signatures.
const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";
/// Names of kernel packages for virtual machines: few drivers, but all that the entries need.
const PREFIX: &str = "linux-image-";
const SUFFIX: &str = "-cloud-amd64";
/// Packages of the same release that newer kernels are split into: image, modules, configuration.
const PARTS: &[&str] = &["linux-binary-", "linux-modules-", "linux-base-"];
/// Prefix of all these names.
const ALL: &str = "linux-";

/// An unpacked kernel.
#[derive(Debug)]
pub(super) struct Kernel {
    /// The requested series: `6.1`, `newest`.
    pub(super) series: String,
    /// The release, as `uname -r` prints it.
    pub(super) release: String,
    folder: PathBuf,
}

impl Kernel {
    /// Path of the kernel image.
    ///
    /// # Errors
    /// The packages contain no image.
    pub(super) fn image(&self) -> anyhow::Result<PathBuf> {
        self.file("vmlinuz")
    }

    /// Path of the kernel's configuration.
    ///
    /// # Errors
    /// The packages contain no configuration.
    pub(super) fn config(&self) -> anyhow::Result<PathBuf> {
        self.file("config")
    }

    /// The folder of the unpacked packages, somewhere below which are the modules.
    pub(super) fn folder(&self) -> &Path {
        &self.folder
    }

    /// A file below `boot` with the release in its name, or without it beside the modules, as in newer packages.
    fn file(&self, name: &str) -> anyhow::Result<PathBuf> {
        let long = format!("{name}-{}", self.release);
        let files = WalkDir::new(&self.folder).into_iter().flatten();
        let files: Vec<_> = files.filter(|entry| entry.file_type().is_file()).collect();
        // Short names are common, so the name with the release comes first.
        let found = [long.as_str(), name].into_iter().find_map(|name| {
            let mut files = files.iter();
            files.find(|entry| entry.file_name() == name).cloned()
        });
        let found =
            found.with_context(|| format!("the packages of {} hold no {name}", self.release))?;
        Ok(found.into_path())
    }
}

/// The packages of a mirror, in a folder of this program.
pub(super) struct Packages {
    folder: PathBuf,
    names: Vec<String>,
}

impl Packages {
    /// Why packages cannot be fetched here; `None` if the tools exist.
    pub(super) fn missing() -> Option<String> {
        for program in ["apt-get", "apt-cache", "dpkg"] {
            if first_line(Command::new(program).arg("--version")).is_none() {
                return Some(format!(
                    "{program} is not here: kernels come as Debian packages"
                ));
            }
        }
        let keys = Path::new(KEYRING).is_file();
        (!keys).then(|| format!("{KEYRING} is missing: install debian-archive-keyring"))
    }

    /// Reads the package lists. The system stays unchanged: sources, lists and cache are in `folder`.
    ///
    /// # Errors
    /// The lists cannot be fetched, and there are no earlier ones.
    pub(super) fn read(folder: &Path) -> anyhow::Result<Self> {
        for below in ["state/lists/partial", "cache/archives/partial", "empty"] {
            fs::create_dir_all(folder.join(below))?;
        }
        fs::write(folder.join("state/status"), "")?;
        fs::write(folder.join("sources.list"), sources())?;
        fs::write(folder.join("apt.conf"), configuration(folder))?;
        let mut packages = Self {
            folder: folder.to_owned(),
            names: Vec::new(),
        };
        let fetched = run_command(packages.apt("apt-get").args(["-qq", "update"]), MINUTES_5);
        let mut list = packages.apt("apt-cache");
        let names = output_of(list.args(["pkgnames", ALL]), MINUTES_5)?.stdout;
        packages.names = names.lines().map(str::to_owned).collect();
        match fetched {
            Ok(()) => (),
            Err(error) if packages.names.is_empty() => {
                return Err(error.context("fetching the lists of packages"));
            }
            Err(error) => println!("vm: lists of packages are those of the last time: {error:#}"),
        }
        Ok(packages)
    }

    /// The newest kernel of a series, fetched and unpacked unless it is already there.
    ///
    /// # Errors
    /// The series has no kernel, or it cannot be fetched.
    pub(super) fn kernel(&self, series: &str) -> anyhow::Result<Kernel> {
        let Some(release) = newest(&self.names, series) else {
            bail!("no packaged kernel of the series {series:?}; `--list` shows all");
        };
        let folder = self.folder.join(&release);
        let kernel = Kernel {
            series: series.to_owned(),
            release,
            folder,
        };
        if kernel.image().is_err() {
            self.unpack(&kernel)?;
        }
        Ok(kernel)
    }

    /// The newest kernel of each series, oldest series first.
    pub(super) fn all(&self) -> Vec<String> {
        let mut releases: Vec<&str> = self.names.iter().filter_map(|name| release(name)).collect();
        releases.sort_by_cached_key(|release| numbers(release));
        let series = |release: &str| numbers(release).into_iter().take(2).collect::<Vec<_>>();
        let newest = releases.iter().enumerate().filter(|(at, release)| {
            let next = releases.get(at + 1);
            next.is_none_or(|next| series(next) != series(release))
        });
        newest.map(|(_, release)| (*release).to_owned()).collect()
    }

    fn unpack(&self, kernel: &Kernel) -> anyhow::Result<()> {
        println!("vm: fetching Linux {}", kernel.release);
        let fetch = self.folder.join("fetch");
        // Remains of an interrupted run.
        fs::remove_dir_all(&fetch).ok();
        fs::create_dir_all(&fetch)?;
        let mut download = self.apt("apt-get");
        let parts = PARTS
            .iter()
            .map(|part| format!("{part}{}", kernel.release))
            .filter(|part| self.names.contains(part));
        download
            .args(["-qq", "download"])
            .arg(format!("{PREFIX}{}", kernel.release))
            .args(parts)
            .current_dir(&fetch);
        run_command(&mut download, MINUTES_5)?;
        let files: Vec<_> = fs::read_dir(&fetch)?.collect::<Result<_, _>>()?;
        let unpacked = fetch.join("unpacked");
        for package in files {
            let mut unpack = Command::new("dpkg");
            unpack.arg("-x").arg(package.path()).arg(&unpacked);
            run_command(&mut unpack, MINUTES_5)?;
        }
        // Rename in one step, so that a partial kernel is never used.
        fs::remove_dir_all(&kernel.folder).ok();
        fs::rename(&unpacked, &kernel.folder)?;
        fs::remove_dir_all(&fetch)?;
        kernel.image().map(drop)
    }

    fn apt(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.env("APT_CONFIG", self.folder.join("apt.conf"));
        command
    }
}

fn sources() -> String {
    SUITES
        .iter()
        .map(|(archive, suite)| {
            format!("deb [arch=amd64 signed-by={KEYRING}] {MIRROR}/{archive} {suite} main\n")
        })
        .collect()
}

/// Configuration that keeps all of apt's files below `folder`. apt would change to a sandbox user, which it does not need here.
fn configuration(folder: &Path) -> String {
    let place = folder.display();
    format!(
        "Dir::State \"{place}/state\";\nDir::State::status \"{place}/state/status\";\nDir::Cache \"{place}/cache\";\n\
         Dir::Etc::sourcelist \"{place}/sources.list\";\nDir::Etc::sourceparts \"{place}/empty\";\n\
         Dir::Etc::preferencesparts \"{place}/empty\";\nDir::Etc::preferences \"{place}/empty/none\";\n\
         Acquire::Languages \"none\";\nAPT::Architecture \"amd64\";\nAPT::Architectures \"amd64\";\n\
         APT::Sandbox::User \"\";\n"
    )
}

/// The release in a package's name, if the package is such a kernel.
fn release(name: &str) -> Option<&str> {
    let release = name.strip_prefix(PREFIX)?;
    let version = release.strip_suffix(SUFFIX)?;
    // Packages without a full version only depend on others; `-rt` packages contain another kernel.
    let plain = version.starts_with(|c: char| c.is_ascii_digit()) && !version.contains("-rt");
    (plain && version.matches('.').count() >= 2).then_some(release)
}

fn newest(names: &[String], series: &str) -> Option<String> {
    let begin = format!("{series}.");
    names
        .iter()
        .filter_map(|name| release(name))
        .filter(|release| series == NEWEST || release.starts_with(&begin))
        .max_by_key(|release| numbers(release))
        .map(str::to_owned)
}

/// All numbers of a version, which order versions.
fn numbers(text: &str) -> Vec<u32> {
    text.split(|c: char| !c.is_ascii_digit())
        .filter_map(|part| part.parse().ok())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names() -> Vec<String> {
        [
            "linux-image-6.1.0-9-cloud-amd64",
            "linux-image-6.1.0-56-cloud-amd64",
            "linux-image-6.1.0-57-cloud-amd64-unsigned",
            "linux-image-6.12-cloud-amd64",
            "linux-image-6.12.95+deb12-cloud-amd64",
            "linux-image-6.12.117+deb12-cloud-amd64",
            "linux-image-7.2.12+deb13-cloud-amd64",
            "linux-image-7.3.4+deb13-amd64",
            "linux-image-cloud-amd64",
        ]
        .map(str::to_owned)
        .to_vec()
    }

    #[test]
    fn newest_kernel_is_chosen_by_number() {
        let found = |series| newest(&names(), series);
        assert_eq!(found("6.1").unwrap(), "6.1.0-56-cloud-amd64");
        assert_eq!(found("6.12").unwrap(), "6.12.117+deb12-cloud-amd64");
        assert_eq!(found(NEWEST).unwrap(), "7.2.12+deb13-cloud-amd64");
        assert_eq!(found("5.10"), None);
    }

    #[test]
    fn list_has_the_newest_of_each_series() {
        let packages = Packages {
            folder: PathBuf::new(),
            names: names(),
        };
        assert_eq!(
            packages.all(),
            [
                "6.1.0-56-cloud-amd64",
                "6.12.117+deb12-cloud-amd64",
                "7.2.12+deb13-cloud-amd64"
            ]
        );
    }
}
