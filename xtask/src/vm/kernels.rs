//! Kernels of Debian, as `kernels.sh` fetches them.

use std::path::PathBuf;
use std::process::Command;

use crate::script;
use crate::steps::{MINUTES_5, stdout_of};
use crate::workspace::Workspace;

/// The default kernels of the table: the oldest supported, the stable release's, and the newest packaged.
pub(super) const SERIES: &[&str] = &["6.1", "6.12", "newest"];
/// The default kernel: it has the strictest verifier and the fewest features.
pub(super) const OLDEST: &str = "6.1";

/// An unpacked kernel.
#[derive(Debug)]
pub(super) struct Kernel {
    /// The requested series: `6.1`, `newest`.
    pub(super) series: String,
    /// The release, as `uname -r` prints it.
    pub(super) release: String,
    /// Its image `vmlinuz`, its configuration `config`, and somewhere below its modules.
    pub(super) folder: PathBuf,
}

/// The newest kernel of each series, fetched and unpacked unless it is already there.
///
/// # Errors
/// A series has no kernel, or it cannot be fetched.
pub(super) fn get(workspace: &Workspace, series: &[&str]) -> anyhow::Result<Vec<Kernel>> {
    let mut get = script::command(workspace, "kernels");
    let releases = stdout_of(
        get.arg("get").args(series),
        MINUTES_5 * (1 + u32::try_from(series.len())?),
    )?;
    let kernels = series
        .iter()
        .zip(releases.lines())
        .map(|(series, release)| Kernel {
            series: (*series).to_owned(),
            release: release.to_owned(),
            folder: workspace.target().join("vm").join(release),
        });
    Ok(kernels.collect())
}

/// A command that lists the newest kernel of each series, oldest series first.
pub(super) fn list(workspace: &Workspace) -> Command {
    let mut list = script::command(workspace, "kernels");
    list.arg("list");
    list
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn newest_kernel_is_chosen_by_number() {
        let names = "linux-image-6.1.0-9-cloud-amd64 linux-image-6.1.0-56-cloud-amd64 \
                     linux-image-6.1.0-57-cloud-amd64-unsigned linux-image-6.12-cloud-amd64 \
                     linux-image-6.12.95+deb12-cloud-amd64 linux-image-6.12.117+deb12-cloud-amd64 \
                     linux-image-7.2.12+deb13-cloud-amd64 linux-image-7.3.4+deb13-amd64 \
                     linux-image-7.4.1-rt-cloud-amd64 linux-image-cloud-amd64";
        let workspace = Workspace::here().unwrap();
        let found = |series: &str| {
            let mut pick = script::command(&workspace, "kernels");
            pick.args(["pick", series])
                .env("NAMES", names.replace(' ', "\n"));
            stdout_of(&mut pick, MINUTES_5).unwrap_or_default()
        };
        assert_eq!(found("6.1"), "6.1.0-56-cloud-amd64\n");
        assert_eq!(found("6.12"), "6.12.117+deb12-cloud-amd64\n");
        assert_eq!(found("newest"), "7.2.12+deb13-cloud-amd64\n");
        assert_eq!(found("5.10"), "");
        // The newest of each series, oldest first.
        assert_eq!(
            found("each"),
            "6.1.0-56-cloud-amd64\n6.12.117+deb12-cloud-amd64\n7.2.12+deb13-cloud-amd64\n"
        );
    }
}
