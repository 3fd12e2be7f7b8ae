//! EXL3 as a form of weight: its rows are those of the whole decoded matrix, padding dropped; a slice is a run of layers.

use checkpoint::{Form, Weight};
use ops::registry::generated_weight;

#[test]
fn rows_are_those_of_the_decoded_layer() {
    for (seed, (rows, cols)) in [(64, 96), (128, 256), (300, 130)].into_iter().enumerate() {
        let w = generated_weight("w", Form::Exl3, rows, cols, 3 + seed as u64);
        assert_eq!((w.form().name(), w.rows(), w.cols(), w.layers().len()), ("exl3", rows, cols, 1));
        let linear = w.layers()[0].linear();
        let (whole, width) = (exl3::reference::weight(&linear), linear.out_features());
        let all = w.to_f32();
        let mut row = vec![0.0; cols];
        for r in (0..rows).step_by(61).chain([rows - 1]) {
            w.decode_row(r, &mut row);
            assert_eq!(row, all[r * cols..][..cols], "row {r}");
            assert!((0..cols).all(|k| row[k] == whole[k * width + r]), "row {r}");
        }
        assert_eq!(
            w.stored_bytes(),
            (linear.trellis().bytes().len() + 2 * width + 2 * linear.in_features()) as u64
        );
    }
}

#[test]
fn a_slice_is_a_run_of_layers() {
    let parts: Vec<Weight> =
        (0..3).map(|i| generated_weight("part", Form::Exl3, [64, 160, 32][i], 128, 10 + i as u64)).collect();
    let w = Weight::exl3("w", parts.iter().map(|p| p.layers()[0].clone()).collect()).unwrap();
    assert_eq!((w.rows(), w.cols()), (256, 128));
    let all: Vec<f32> = parts.iter().flat_map(Weight::to_f32).collect();
    assert_eq!(w.to_f32(), all);
    let middle = w.rows_slice(64, 160);
    assert_eq!((middle.rows(), middle.layers().len()), (160, 1));
    assert_eq!(middle.to_f32(), parts[1].to_f32());
    let mut row = vec![0.0; 128];
    w.decode_row(230, &mut row);
    assert_eq!(row, all[230 * 128..][..128]);
    let narrow = generated_weight("other", Form::Exl3, 64, 256, 1).layers()[0].clone();
    let mixed = Weight::exl3("w", vec![parts[0].layers()[0].clone(), narrow]);
    assert!(mixed.unwrap_err().contains("128 and of 256 inputs"));
    assert!(Weight::exl3("w", vec![]).is_err());
}

#[test]
fn a_backend_without_it_refuses_by_name() {
    let w = generated_weight("layers.0.attn.wq_a", Form::Exl3, 64, 96, 3);
    let plain = generated_weight("plain", Form::Bf16, 8, 32, 3);
    assert!(ops::refuse_exl3("test", [&plain]).is_ok());
    let error = ops::refuse_exl3("test", [&plain, &w]).unwrap_err();
    assert!(error.refused && error.to_string().contains("layers.0.attn.wq_a is EXL3"), "{error}");
}
