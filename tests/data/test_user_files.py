import io
import sys

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from PIL import Image

from pecil.data import files as data_files
from pecil.data import load, stream


def save_image(path, array, mode=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(np.asarray(array, np.uint8))
    (image.convert(mode) if mode else image).save(path)


@pytest.fixture
def grey(tmp_path):
    """Two classes of grey images: cat 0, 1, 2 and dog 10, 11."""
    for label, values in (("cat", (0, 1, 2)), ("dog", (10, 11))):
        for i, value in enumerate(values):
            save_image(tmp_path / "pets" / label / f"{i}.png", np.full((4, 6), value))
    return tmp_path / "pets"


class TestFolder:
    def test_grey_images_become_one_array_by_class_and_file_name(self, grey):
        data = load(grey)
        assert data.name == "pets" and data.test_x is None and data.test_y is None
        assert data.train_x.shape == (5, 4, 6) and data.train_x.dtype == np.uint8
        assert data.train_x[:, 0, 0].tolist() == [0, 1, 2, 10, 11]
        assert data.train_y.tolist() == ["cat"] * 3 + ["dog"] * 2
        assert [task.classes for task in stream(data, "2/1")] == [("cat",), ("dog",)]

    def test_one_colour_image_makes_all_colour(self, grey):
        save_image(grey / "dog/z.png", np.full((4, 6, 3), (1, 2, 3)))
        data = load(str(grey))
        assert data.train_x.shape == (6, 4, 6, 3)
        assert data.train_x[0, 0, 0].tolist() == [0, 0, 0]
        assert data.train_x[-1, 0, 0].tolist() == [1, 2, 3]

    @pytest.mark.parametrize(("mode", "colour"), [("P", True), ("RGBA", True), ("1", False)])
    def test_palette_transparency_and_bits(self, tmp_path, mode, colour):
        save_image(tmp_path / "white/a.png", np.full((4, 4, 3), 255), mode)
        data = load(tmp_path)
        assert data.train_x.shape == ((1, 4, 4, 3) if colour else (1, 4, 4))
        assert np.all(data.train_x == 255)

    def test_train_and_test_folders(self, grey):
        save_image(grey.parent / "split/train/cat/a.png", np.full((4, 6), 1))
        save_image(grey.parent / "split/train/dog/a.png", np.full((4, 6), 2))
        save_image(grey.parent / "split/test/dog/b.png", np.full((4, 6), 3))
        data = load(grey.parent / "split")
        assert data.train_y.tolist() == ["cat", "dog"] and data.test_y.tolist() == ["dog"]
        assert data.test_x[:, 0, 0].tolist() == [3]

    def test_a_class_may_be_called_train(self, tmp_path):
        for label in ("car", "train"):
            save_image(tmp_path / label / "a.png", np.zeros((2, 2)))
        assert load(tmp_path).train_y.tolist() == ["car", "train"]

    def test_other_files_and_hidden_folders_are_passed_over(self, grey):
        (grey / "cat/notes.txt").write_text("no image")
        (grey / "readme.md").write_text("no folder")
        (grey / "cat/notes").mkdir()
        (grey / "cat/notes/0.txt").write_text("no image")
        save_image(grey / "cat/.thumbnails/small/a.png", np.zeros((1, 1)))
        save_image(grey / ".thumbnails/a.png", np.zeros((1, 1)))
        assert len(load(grey).train_y) == 5

    def test_images_of_another_size_are_named(self, grey):
        for i in range(5):
            save_image(grey / f"dog/odd{i}.png", np.zeros((6, 4)))
        save_image(grey / "cat/3.png", np.zeros((4, 6)))
        with pytest.raises(
            ValueError, match=r"most are 6x4 .*odd0.png is 4x6;.*; and 2 more; resize"
        ):
            load(grey)

    def test_nothing_to_read_is_an_error(self, grey, tmp_path):
        (tmp_path / "empty").mkdir()
        with pytest.raises(ValueError, match="found no folder"):
            load(tmp_path / "empty")
        (grey / "fish").mkdir()
        with pytest.raises(ValueError, match="fish: expected the images of a class, found none"):
            load(grey)

    @pytest.mark.parametrize("split", [False, True])
    def test_images_beside_the_classes_are_refused(self, grey, split):
        root = grey.parent if split else grey
        if split:
            grey.rename(root / "train")
        save_image(root / "stray.png", np.zeros((4, 6)))
        with pytest.raises(
            ValueError, match="per class, found images beside folders, .* stray.png"
        ):
            load(root)

    @pytest.mark.parametrize("folder", ["cat/more", "cat/2019/may", "fish/more"])
    def test_images_below_a_class_are_refused(self, grey, folder):
        save_image(grey / folder / "x.png", np.zeros((4, 6)))
        with pytest.raises(ValueError, match="expected the images of a class, all .*/x.png; move"):
            load(grey)
        with pytest.raises(ValueError, match="expected the images of a class, all .*/x.png; move"):
            load(grey, labelled=False)

    @pytest.mark.parametrize("kept", [0, 20, 60])
    def test_a_damaged_image_is_named(self, grey, kept):
        save_image(grey / "dog/9.png", np.random.default_rng(0).integers(0, 256, (4, 6)))
        path = grey / "dog/9.png"
        path.write_bytes(path.read_bytes()[:kept])
        with pytest.raises(ValueError, match=r"cannot read the image .*9\.png"):
            load(grey)

    def test_sixteen_bits_are_refused(self, grey):
        Image.fromarray(np.full((4, 6), 60_000, np.uint16)).save(grey / "dog/16.png")
        with pytest.raises(ValueError, match=r"16\.png: expected 8 bits"):
            load(grey)

    def test_files_are_named_as_they_lie_in_the_folder(self, grey):
        data = load(grey)
        assert data.train_files == ("cat/0.png", "cat/1.png", "cat/2.png", "dog/0.png", "dog/1.png")
        assert data.test_files is None


class TestFolderWithoutLabels:
    def test_a_plain_folder_of_images(self, grey):
        (grey / "cat/notes.txt").write_text("no image")
        data = load(grey / "cat", labelled=False)
        assert data.name == "cat" and data.train_y is None and data.test_x is None
        assert data.train_x[:, 0, 0].tolist() == [0, 1, 2]
        assert data.train_files == ("0.png", "1.png", "2.png")
        with pytest.raises(ValueError, match="sub-folder of images per class, found no folder"):
            load(grey / "cat")

    def test_labels_are_read_where_they_are(self, grey):
        data, labelled = load(grey, labelled=False), load(grey)
        assert data.train_y.tolist() == labelled.train_y.tolist()
        assert data.train_files == labelled.train_files

    def test_a_test_part_without_labels(self, grey):
        save_image(grey.parent / "split/train/cat/a.png", np.full((4, 6), 1))
        save_image(grey.parent / "split/test/b.png", np.full((4, 6), 3))
        data = load(grey.parent / "split", labelled=False)
        assert data.train_y.tolist() == ["cat"] and data.test_y is None
        assert data.test_x[:, 0, 0].tolist() == [3]
        assert (data.train_files, data.test_files) == (("train/cat/a.png",), ("test/b.png",))

    def test_images_beside_folders_are_not_passed_over(self, grey):
        save_image(grey / "stray.png", np.zeros((4, 6)))
        with pytest.raises(ValueError, match="pets: expected .* or images alone, found images bes"):
            load(grey, labelled=False)

    def test_nothing_to_read_is_an_error(self, tmp_path):
        (tmp_path / "readme.md").write_text("no image")
        with pytest.raises(ValueError, match="per class or images alone, found neither"):
            load(tmp_path, labelled=False)


class TestNpz:
    @pytest.mark.parametrize("names", [("x", "y"), ("X", "y"), ("train_x", "train_y")])
    def test_names_of_the_arrays(self, tmp_path, names):
        x = np.arange(12.0).reshape(4, 3)
        np.savez(tmp_path / "own.npz", **dict(zip(names, (x, [1, 1, 5, 5]), strict=True)))
        data = load(tmp_path / "own.npz")
        assert data.name == "own" and data.test_x is None
        assert np.array_equal(data.train_x, x) and data.train_y.tolist() == [1, 1, 5, 5]
        assert data.feature_names is None

    def test_compressed_with_test_part_and_text_labels(self, tmp_path):
        x = np.random.default_rng(0).integers(0, 256, (4, 5, 5, 3)).astype(np.uint8)
        y = np.array(["a", "b", "a", "b"])
        np.savez_compressed(
            tmp_path / "own.npz", train_x=x, train_y=y, test_x=x[:2], test_y=y[:2], other=1
        )
        data = load(tmp_path / "own.npz")
        assert np.array_equal(data.test_x, x[:2]) and data.train_y.tolist() == y.tolist()

    @pytest.mark.parametrize(
        ("arrays", "message"),
        [
            ({}, "found nothing"),
            ({"a": [1]}, "found a"),
            ({"a": [1], "x": np.ones((2, 2)), "b": [1]}, "found a, b, x"),
            ({"x": np.ones((2, 2))}, "found x"),
            ({"x": np.ones((2, 2)), "y": [1]}, "expected 2 labels"),
            ({"x": np.ones((2, 2)), "y": [[1], [2]]}, "expected 2 labels"),
            ({"x": np.ones(2), "y": [1, 2]}, "one vector or image per sample"),
            ({"x": np.ones((0, 2)), "y": []}, "one vector or image per sample"),
            ({"x": [["a"], ["b"]], "y": [1, 2]}, "expected numbers"),
            ({"x": np.ones((2, 2)), "y": [1.0, np.nan]}, "sample 1 has no label"),
            ({"x": np.ones((2, 2)), "y": ["", "a"]}, "sample 0 has no label"),
            ({"x": np.ones((2, 2)), "y": np.array([1, "a"], object)}, "damaged or not"),
            ({"x": [[1, 2], [1, np.nan]], "y": [1, 2]}, "train_x: row 1 holds .* not finite"),
            ({"x": [[1, 2], [1e39, 1]], "y": [1, 2]}, "train_x: row 1 holds .* not finite"),
            ({"x": np.full((2, 3, 3), np.inf, "f2"), "y": [1, 2]}, "train_x: row 0 holds"),
            (
                dict(train_x=np.ones((2, 1)), train_y=[0, 1], test_x=[[np.nan]], test_y=[0]),
                "test_x: row 0 holds a number that is not finite",
            ),
            (
                dict(train_x=np.ones((2, 2)), train_y=[0, 1], test_x=np.ones((1, 3)), test_y=[0]),
                "differ in shape",
            ),
        ],
    )
    def test_bad_content_is_described(self, tmp_path, arrays, message):
        np.savez(tmp_path / "own.npz", **arrays)
        with pytest.raises(ValueError, match=message) as error:
            load(tmp_path / "own.npz")
        assert "own.npz" in str(error.value)

    @pytest.mark.parametrize("name", ["x", "X", "train_x"])
    def test_without_labels(self, tmp_path, name):
        np.savez(tmp_path / "own.npz", **{name: np.ones((4, 3))})
        data = load(tmp_path / "own.npz", labelled=False)
        assert data.train_x.shape == (4, 3)
        assert data.train_y is data.test_x is data.test_y is data.train_files is None

    def test_a_test_part_without_labels(self, tmp_path):
        x = np.ones((4, 3))
        np.savez(tmp_path / "own.npz", train_x=x, train_y=[0, 0, 1, 1], test_x=x[:2])
        data = load(tmp_path / "own.npz", labelled=False)
        assert data.train_y.tolist() == [0, 0, 1, 1]
        assert data.test_x.shape == (2, 3) and data.test_y is None

    @pytest.mark.parametrize(
        ("arrays", "message"),
        [
            ({"y": [1, 2]}, "found y"),
            ({"test_x": np.ones((2, 2))}, "found test_x"),
            ({"x": np.ones((2, 2)), "train_y": [1, 2]}, "found train_y, x"),
            ({"x": np.ones((2, 2)), "test_y": [1, 2]}, "found test_y, x"),
            ({"x": np.ones(2)}, "one vector or image per sample"),
            ({"x": np.ones((2, 2)), "y": [1]}, "expected 2 labels"),
            ({"x": np.ones((2, 2)), "test_x": np.ones((2, 3))}, "differ in shape"),
        ],
    )
    def test_bad_content_without_labels_is_described(self, tmp_path, arrays, message):
        np.savez(tmp_path / "own.npz", **arrays)
        with pytest.raises(ValueError, match=message):
            load(tmp_path / "own.npz", labelled=False)

    def test_an_archive_cut_anywhere_is_refused(self, tmp_path):
        path = self.saved(tmp_path)
        whole = path.read_bytes()
        for kept in range(0, len(whole), 7):
            path.write_bytes(whole[:kept])
            with pytest.raises(ValueError, match=r"own\.npz is damaged"):
                load(path)

    @pytest.mark.filterwarnings("ignore::UserWarning")  # zipfile: a name appears twice
    @pytest.mark.parametrize("compressed", [False, True])
    def test_a_changed_byte_is_refused_or_harmless(self, tmp_path, compressed):
        path = self.saved(tmp_path, compressed)
        whole = path.read_bytes()
        expected = load(path)
        refused = 0
        for position in range(0, len(whole), 3):
            path.write_bytes(
                whole[:position] + bytes([whole[position] ^ 0xFF]) + whole[position + 1 :]
            )
            try:
                data = load(path)
            except ValueError as error:
                refused += "own.npz" in str(error)
            else:
                assert np.array_equal(data.train_x, expected.train_x)
                assert np.array_equal(data.train_y, expected.train_y)
        assert refused > len(whole) / 3 / 2

    @staticmethod
    def saved(folder, compressed=False):
        save = np.savez_compressed if compressed else np.savez
        x = np.random.default_rng(0).integers(0, 256, (5, 4)).astype(np.uint8)
        save(folder / "own.npz", x=x, y=np.arange(5))
        return folder / "own.npz"

    def test_a_file_that_may_not_be_read_is_not_called_damaged(self, tmp_path, monkeypatch):
        def refused(path):
            raise PermissionError(13, "Permission denied", str(path))

        path = self.saved(tmp_path)
        monkeypatch.setattr(data_files.zipfile, "ZipFile", refused)
        with pytest.raises(PermissionError, match="own.npz"):
            load(path)

    def test_an_array_is_no_archive(self, tmp_path):
        np.save(tmp_path / "own.npy", np.ones(3))
        (tmp_path / "own.npy").rename(tmp_path / "own.npz")
        with pytest.raises(ValueError, match="own.npz is damaged or not an .npz"):
            load(tmp_path / "own.npz")


def write_table(path, columns):
    table = pa.table(columns)
    if path.suffix == ".csv":
        pyarrow.csv.write_csv(table, path)
    else:
        pq.write_table(table, path)
    return path


@pytest.mark.parametrize("suffix", [".csv", ".parquet", ".PARQUET"])
class TestTable:
    def test_features_and_labels(self, tmp_path, suffix):
        path = write_table(
            tmp_path / f"own{suffix}", {"a": [0.5, 1.5], "label": ["x", "y"], "b": [3, 4]}
        )
        data = load(path)
        assert data.name == "own" and data.train_y.tolist() == ["x", "y"] and data.test_x is None
        assert data.train_x.tolist() == [[0.5, 3], [1.5, 4]] and data.train_x.dtype == np.float32
        assert data.feature_names == ("a", "b")

    def test_the_label_column_can_be_chosen(self, tmp_path, suffix):
        path = write_table(tmp_path / f"own{suffix}", {"a": [0.5, 1.5], "kind": [7, 9]})
        data = load(path, label="kind")
        assert data.train_y.tolist() == [7, 9] and data.train_y.dtype == np.int64

    def test_an_absent_label_column_lists_the_others(self, tmp_path, suffix):
        path = write_table(tmp_path / f"own{suffix}", {"a": [0.5], "kind": [7]})
        with pytest.raises(ValueError, match=r"label'.*label= \(--label\): 'a', 'kind'"):
            load(path)
        with pytest.raises(ValueError, match="no column 'sort'"):
            load(path, label="sort")

    @pytest.mark.parametrize("label", [None, "kind"])
    def test_without_labels_all_columns_are_features(self, tmp_path, suffix, label):
        path = write_table(tmp_path / f"own{suffix}", {"a": [0.5, 1.5], "b": [3, 4]})
        data = load(path, label=label, labelled=False)
        assert data.train_x.tolist() == [[0.5, 3], [1.5, 4]] and data.train_y is None

    @pytest.mark.parametrize(("column", "label"), [("label", None), ("kind", "kind")])
    def test_labels_are_read_where_they_are(self, tmp_path, suffix, column, label):
        path = write_table(tmp_path / f"own{suffix}", {"a": [0.5, 1.5], column: ["x", "y"]})
        data = load(path, label=label, labelled=False)
        assert data.train_x.tolist() == [[0.5], [1.5]] and data.train_y.tolist() == ["x", "y"]

    @pytest.mark.parametrize(
        ("columns", "message"),
        [
            ({"a": [1.0, 2.0], "kind": ["x", "y"]}, "column 'kind': features must be numbers"),
            ({"a": [1.0, 2.0], "label": [None, 1]}, "column 'label': 1 values .*row 0"),
            ({"label": [0, 1]}, "2 rows and 0 columns beside 'label'"),
            ({"a": pa.array([], pa.float64())}, "0 rows and 1 columns"),
        ],
    )
    def test_bad_content_without_labels_is_described(self, tmp_path, suffix, columns, message):
        path = write_table(tmp_path / f"own{suffix}", columns)
        with pytest.raises(ValueError, match=message):
            load(path, labelled=False)

    @pytest.mark.parametrize(
        ("columns", "message"),
        [
            ({"a": [1.0, None], "label": [0, 1]}, "column 'a': 1 values are missing.*row 1"),
            ({"a": [1.0, 2.0], "label": [None, 1]}, "column 'label': 1 values .*row 0"),
            ({"a": [1.0, 2.0], "label": ["", "b"]}, "column 'label': sample 0 has no label"),
            ({"a": ["u", "v"], "label": [0, 1]}, "'a': features must be numbers, found .*--label"),
            ({"a": ["1.5", "x"], "label": [0, 1]}, "numbers, found string, such as 'x' in row 1"),
            ({"a": ["1_0", "2"], "label": [0, 1]}, "numbers, found string, such as '1_0' in row 0"),
            ({"a": [1.0, 1e39], "label": [0, 1]}, "column 'a': row 1 holds .* not finite"),
            ({"a": [-np.inf, 1.0], "label": [0, 1]}, "column 'a': row 0 holds .* not finite"),
            ({"label": [0, 1]}, "2 rows and 0 columns beside 'label'"),
            ({"": [0, 1], "a": [1.0, 2.0], "label": [0, 1]}, "looks like a table's index"),
        ],
    )
    def test_bad_content_is_described(self, tmp_path, suffix, columns, message):
        path = write_table(tmp_path / f"own{suffix}", columns)
        with pytest.raises(ValueError, match=message) as error:
            load(path)
        assert f"own{suffix}" in str(error.value)

    def test_no_rows_no_data(self, tmp_path, suffix):
        empty = pa.array([], pa.float64())
        path = write_table(tmp_path / f"own{suffix}", {"a": empty, "label": empty})
        with pytest.raises(ValueError, match="0 rows"):
            load(path)

    def test_an_empty_file_is_named(self, tmp_path, suffix):
        (tmp_path / f"own{suffix}").touch()
        with pytest.raises(ValueError, match=rf"cannot read .*own\{suffix}"):
            load(tmp_path / f"own{suffix}")

    def test_without_pyarrow_the_extra_is_named(self, tmp_path, suffix, monkeypatch):
        path = write_table(tmp_path / f"own{suffix}", {"a": [0.5], "label": [7]})
        monkeypatch.setitem(sys.modules, "pyarrow", None)
        with pytest.raises(ImportError, match=r'pyarrow is needed.*pip install "pecil\[files\]"'):
            load(path)


class TestParquet:
    @pytest.mark.parametrize("kind", [pa.list_(pa.float64()), pa.list_(pa.float32(), 3)])
    def test_a_column_of_lists_is_the_features(self, tmp_path, kind):
        lists = pa.array([[1, 2, 3], [4, 5, 6]], kind)
        columns = {"features": lists, "one": [[7], [8]], "label": [0, 1]}
        data = load(write_table(tmp_path / "own.parquet", columns))
        assert data.train_x.tolist() == [[1, 2, 3, 7], [4, 5, 6, 8]]
        assert data.feature_names == ("features[0]", "features[1]", "features[2]", "one")

    @pytest.mark.parametrize(
        ("lists", "message"),
        [
            ([[1.0, 2.0], [3.0]], r"lists of one length, found \[1, 2\]"),
            ([[], []], r"lists of one length, found \[0\]"),
            ([[1.0, 2.0], [3.0, None]], "1 values are missing, the first in row 1"),
            ([[1.0], None], "1 values are missing, the first in row 1"),
            ([[[1.0]], [[2.0]]], "features must be numbers, found list"),
            ([["1", "2"], ["3", "x"]], "found string, such as 'x' in row 1"),
            ([["1"], ["2"]], "found string, such as '1' in row 0"),
        ],
    )
    def test_uneven_lists_are_refused(self, tmp_path, lists, message):
        path = write_table(tmp_path / "own.parquet", {"features": lists, "label": [0, 1]})
        with pytest.raises(ValueError, match=message):
            load(path)

    def test_text_labels_may_be_categories(self, tmp_path):
        labels = pa.array(["b", "a", "b"]).dictionary_encode()
        path = write_table(tmp_path / "own.parquet", {"a": [1, 2, 3], "label": labels})
        assert load(path).train_y.tolist() == ["b", "a", "b"]

    @pytest.mark.parametrize("labels", [pa.array([0, 1], pa.timestamp("s")), [[1], [2]]])
    def test_labels_of_another_kind_are_refused(self, tmp_path, labels):
        path = write_table(tmp_path / "own.parquet", {"a": [1, 2], "label": labels})
        with pytest.raises(ValueError, match="column 'label': labels must be numbers or text"):
            load(path)

    def test_an_index_is_no_feature(self, tmp_path):
        columns = {"a": [1, 2], "label": [0, 1], "__index_level_0__": [0, 1]}
        path = write_table(tmp_path / "own.parquet", columns)
        with pytest.raises(ValueError, match="index=False"):
            load(path)

    def test_damage_is_named(self, tmp_path):
        path = write_table(tmp_path / "own.parquet", {"a": [1, 2], "label": [0, 1]})
        path.write_bytes(path.read_bytes()[:-20])
        with pytest.raises(ValueError, match="cannot read .*own.parquet"):
            load(path)


class TestCsv:
    @pytest.mark.parametrize(
        ("written", "labels"),
        [
            (["001", "010"], ["001", "010"]),
            (['"001"', "1"], ["001", "1"]),
            (["7", " 007 "], ["7", "007"]),
            (["001", "2.0"], ["001", "2.0"]),
            (["+1", "-1"], ["+1", "-1"]),
            (["0x10", "16"], ["0x10", "16"]),
            (["12345678901234567890", "1"], ["12345678901234567890", "1"]),
            (["-1", " 10 "], [-1, 10]),
            (["1", "2.0"], [1.0, 2.0]),
            (["1e2", "0.0"], [100.0, 0.0]),
            (["true", "False"], [True, False]),
            (["001", "a"], ["001", "a"]),
        ],
    )
    def test_labels_are_numbers_only_where_that_loses_nothing(self, tmp_path, written, labels):
        (tmp_path / "own.csv").write_text(f"a,label\n1,{written[0]}\n2,{written[1]}\n")
        assert list(map(repr, load(tmp_path / "own.csv").train_y.tolist())) == [*map(repr, labels)]

    @pytest.mark.parametrize("text", ["a,kind\n1,café\n", "é,kind\n1,2\n", "é,kind\n1,ö\n"])
    def test_another_encoding_is_named(self, tmp_path, text):
        (tmp_path / "own.csv").write_text(text, encoding="latin-1")
        with pytest.raises(ValueError, match=r"own\.csv is not UTF-8, as a \.csv must be"):
            load(tmp_path / "own.csv", label="kind")
        (tmp_path / "own.csv").write_text(text, encoding="utf-8-sig")
        assert load(tmp_path / "own.csv", label="kind").train_x.tolist() == [[1]]

    def test_a_bad_cell_is_named_however_far_down(self, tmp_path):
        rows = [f"{k},{k % 2}" for k in range(300_000)]
        rows[-2] = "n/k,1"
        (tmp_path / "own.csv").write_text("\n".join(["a,label", *rows]))
        with pytest.raises(ValueError, match="found string, such as 'n/k' in row 299998"):
            load(tmp_path / "own.csv")


def test_two_columns_of_one_name_are_refused(tmp_path):
    (tmp_path / "own.csv").write_text("a,a,label\n1,2,0\n")
    with pytest.raises(ValueError, match="more than one column 'a'"):
        load(tmp_path / "own.csv")


def test_another_kind_of_file_lists_those_that_can_be_read(tmp_path):
    (tmp_path / "own.xlsx").touch()
    with pytest.raises(ValueError, match="own.xlsx.*an .npz, a .csv or a .parquet"):
        load(tmp_path / "own.xlsx")


@pytest.mark.parametrize("kind", ["folder", "npz"])
def test_label_is_for_tables(tmp_path, kind):
    path = tmp_path
    if kind == "npz":
        path = tmp_path / "own.npz"
        np.savez(path, x=np.ones((1, 1)), y=[0])
    with pytest.raises(ValueError, match="label='kind' is for CSV and Parquet"):
        load(path, label="kind")


def test_without_pillow_the_extra_is_named(grey, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    monkeypatch.delitem(sys.modules, "PIL.Image", raising=False)
    with pytest.raises(ImportError, match=r'PIL is needed.*pip install "pecil\[files\]"'):
        load(grey)


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(("stderr", "shown"), [(Terminal, True), (io.StringIO, False)])
def test_progress_is_shown_on_a_terminal_alone(monkeypatch, stderr, shown):
    seconds = iter(range(100))
    monkeypatch.setattr(data_files.time, "monotonic", lambda: next(seconds))
    monkeypatch.setattr(sys, "stderr", stderr())
    assert list(data_files.progress("abcd", 4, "reading")) == list("abcd")
    assert ("reading 3 of 4" in sys.stderr.getvalue()) == shown
    assert not shown or sys.stderr.getvalue().endswith(" \r")


def test_what_macos_adds_is_passed_over(tmp_path):
    for label in ("cat", "dog"):
        picture = Image.fromarray(np.zeros((4, 4, 3), np.uint8))
        (tmp_path / label).mkdir()
        picture.save(tmp_path / label / "0.png")
        (tmp_path / label / "._0.png").write_bytes(b"no picture")
    (tmp_path / "__MACOSX").mkdir()
    (tmp_path / "__MACOSX" / "0.png").write_bytes(b"no picture")
    data = load(tmp_path)
    assert data.train_y.tolist() == ["cat", "dog"]


def test_a_folder_for_validation_is_no_class(tmp_path):
    for part in ("train", "val", "test"):
        (tmp_path / part / "cat").mkdir(parents=True)
    with pytest.raises(ValueError, match="or train/ and test/ of these, but there is val/, too"):
        load(tmp_path)


def test_an_empty_column_of_labels_is_none(tmp_path):
    path = tmp_path / "new.csv"
    path.write_text("a,b,label\n1,2,\n5,3,\n")
    assert data_files.read_table(path, "label", labelled=False)["train_y"] is None
    with pytest.raises(ValueError, match="2 values are missing"):
        data_files.read_table(path, "label")
