//! Draws the plots of a results file that `benches/peers/side-by-side.sh` wrote:
//!
//! ```sh
//! cargo run -p vpmm-harness --example plots -- results.jsonl FOLDER
//! ```
//!
//! Writes `cases.svg` (time per operation), `threads.svg` (threads together) and `memory.svg`
//! (memory held in replays); a plot whose figures are missing is left out, and said so.

#![forbid(unsafe_code)]

mod bars;
mod dots;
mod frame;
mod palette;
mod results;
mod scaling;

use std::error::Error;
use std::path::Path;
use std::process::ExitCode;

use results::Results;

/// What a plot came to: whether there was anything to draw.
type Drawn = Result<bool, Box<dyn Error>>;

/// Draws one plot into a file.
type Plot = fn(&Results, &Path) -> Drawn;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [results, folder] = arguments.as_slice() else {
        eprintln!("usage: plots RESULTS.jsonl FOLDER");
        return ExitCode::from(2);
    };
    match draw_all(Path::new(results), Path::new(folder)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn draw_all(results: &Path, folder: &Path) -> Result<(), Box<dyn Error>> {
    let results = Results::read(results)?;
    std::fs::create_dir_all(folder)?;
    let plots: [(&str, Plot); 3] =
        [("cases.svg", dots::draw), ("threads.svg", scaling::draw), ("memory.svg", bars::draw)];
    for (name, draw) in plots {
        let path = folder.join(name);
        if draw(&results, &path)? {
            println!("{}", path.display());
        } else {
            println!("{name}: no figures for it");
        }
    }
    Ok(())
}
