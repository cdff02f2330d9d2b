//! `cargo xtask release`: checks that a commit can be released, and builds all artefacts of the release.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context as _, ensure};

use crate::dist::{self, Arch, Release};
use crate::script;
use crate::steps::Outcome;
use crate::workspace::Workspace;

/// Which release.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The version, such as 0.1.0.
    version: String,
    /// Sign with a throwaway key, and take a section of the changelog without a date.
    #[arg(long)]
    dry_run: bool,
    /// Sign with this private key: ed25519, PEM.
    #[arg(long, value_name = "FILE", required_unless_present = "dry_run")]
    key: Option<PathBuf>,
    /// For this processor; repeatable.
    #[arg(long, value_name = "ARCH", default_value = "amd64")]
    arch: Vec<Arch>,
}

/// A section of the changelog.
#[derive(Debug, PartialEq, Eq)]
struct Section<'a> {
    version: &'a str,
    /// Text after the version: a date, or `(unreleased)`.
    date: &'a str,
    notes: &'a str,
}

/// Builds and verifies the release. Publishes nothing.
///
/// # Errors
/// Versions differ, the tree has changes, or an artefact cannot be built.
pub(crate) fn run(workspace: &Workspace, args: &Args) -> anyhow::Result<()> {
    let release = Release::of(workspace)?;
    let (version, changelog) = (&release.version, workspace.text("CHANGELOG.md")?);
    ensure!(
        *version == args.version,
        "Cargo.toml has the version {version}, not {}",
        args.version
    );
    let changelog = changelog.unwrap_or_default();
    let section = Section::top(&changelog).context("CHANGELOG.md has no section of a version")?;
    ensure!(
        section.version == version,
        "the top section of CHANGELOG.md is of {}, not of {version}",
        section.version
    );
    ensure!(
        args.dry_run || is_date(section.date),
        "the section {version} of CHANGELOG.md has no date, such as `## {version} - 2026-01-31`, but {:?}",
        section.date
    );
    ensure!(!section.notes.is_empty(), "the section {version} is empty");
    let changes = workspace.git(&["status", "--porcelain"])?;
    ensure!(changes.is_empty(), "the tree has changes:\n{changes}");

    let out = workspace.target().join(format!("release-{version}"));
    dist::make(workspace, &release, &args.arch, &out)?;
    let notes = out.join(format!("adit-{version}-notes.md"));
    fs::write(notes, format!("{}\n", section.notes))?;
    let mut chart = script::command(workspace, "chart");
    if let Outcome::Skipped(why) = script::outcome(chart.arg("package").arg(&out))? {
        println!("release: SKIPPED: the chart is not packed: {why}");
    }
    dist::sign(workspace, &out, args.key.as_deref())?;
    dist::print_table(&out)?;
    println!("release: {} is complete and verified", out.display());
    if args.dry_run {
        println!("release: this was a dry run: the signature is of a throwaway key");
    }
    Ok(())
}

impl<'a> Section<'a> {
    /// The first section of a changelog.
    fn top(changelog: &'a str) -> Option<Self> {
        let start = changelog.find("\n## ")? + "\n## ".len();
        let (title, rest) = changelog.get(start..)?.split_once('\n')?;
        let notes = rest.split("\n## ").next().unwrap_or_default().trim();
        let (version, date) = title.split_once(' ').unwrap_or((title, ""));
        Some(Self {
            version,
            date: date.trim_start_matches("- ").trim(),
            notes,
        })
    }
}

/// Whether a text has the form `2026-01-31`.
fn is_date(text: &str) -> bool {
    let shape: String = text
        .chars()
        .map(|c| if c.is_ascii_digit() { '0' } else { c })
        .collect();
    shape == "0000-00-00"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_top_section_of_a_changelog_has_version_date_and_notes() {
        let changelog = "# Changelog\n\nText.\n\n## 0.2.0 - 2026-01-31\n\nNew.\n\n### More\n\n## 0.1.0\n\nOld.\n";
        let top = Section::top(changelog).unwrap();
        assert_eq!(
            top,
            Section {
                version: "0.2.0",
                date: "2026-01-31",
                notes: "New.\n\n### More"
            }
        );
        assert!(is_date(top.date) && !is_date("(unreleased)"));
    }

    #[test]
    fn our_changelog_begins_with_the_version_of_the_manifest() {
        let workspace = Workspace::here().unwrap();
        let changelog = workspace.text("CHANGELOG.md").unwrap().unwrap();
        let manifest = workspace.text("Cargo.toml").unwrap().unwrap();
        let version = Section::top(&changelog).unwrap().version;
        assert!(manifest.contains(&format!("\nversion = \"{version}\"\n")));
    }
}
